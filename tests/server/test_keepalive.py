"""Comments in streams that pause: where they come, and where they must not."""

import asyncio
import contextlib
import json
import math
import socket
from types import SimpleNamespace

import pytest

from jaxserve.server.app import create_app
from jaxserve.server.respond import KEEP_ALIVE, KeepAlive

PATH = "/v1/completions"
COMMENT = ": keep-alive"


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def text_of(body):
    """The text of a stream's events; every piece between two empty lines is whole."""
    *pieces, rest = body.split("\n\n")
    assert rest == ""
    *events, done = [piece for piece in pieces if piece != COMMENT]
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def open_stream(port, body, receive_buffer=None):
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    raw = json.dumps(body | {"stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return reader, writer


def words(count):
    return "".join(f"w0.{i} " for i in range(count))


async def test_the_exact_bytes_of_a_pause(start, fake):
    """In the middle of a stream, as one HTTP chunk: what a preempted request sends."""
    running = await start(fake(stall=1), keepalive=0.02)
    reader, writer = await open_stream(running.port, {"prompt": "a", "max_tokens": 2})
    with contextlib.closing(writer):
        await reader.readuntil(b'"text":"w0.0 ","logprobs":null,"finish_reason":null}]}\n\n\r\n')
        for _ in range(3):
            assert await reader.readexactly(19) == b"e\r\n: keep-alive\n\n\r\n"
        running.engine.go.set()
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert b'"text":"w0.1 "' in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_openai_clients_read_past_them(start, fake):
    running = await start(fake(stall=1), keepalive=0.01)
    stream = await running.client.completions.create(
        model="fake", prompt="a", max_tokens=4, stream=True
    )
    texts = [(await anext(stream)).choices[0].text]
    asyncio.get_running_loop().call_later(0.1, running.engine.go.set)
    texts += [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == words(4)


async def test_nothing_is_sent_before_the_first_event(start, fake):
    """vllm bench takes its first-token time from it, and an error still needs the status."""
    running = await start(fake(stall=0), keepalive=0.005)
    reader, writer = await open_stream(running.port, {"prompt": "a", "max_tokens": 1})
    with contextlib.closing(writer):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        running.engine.go.set()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"\n\n")).split(b"\r\n")[1].startswith(b"data: {")


async def test_they_never_come_inside_an_event(start, fake):
    """Tokens and comments at the same pace, in 8 streams."""
    running = await start(fake(interval=0.001), keepalive=0.001)
    body = {"prompt": "a", "max_tokens": 150, "stream": True}

    async def read():
        async with running.http.post(running.url + PATH, json=body) as response:
            return await response.text()

    bodies = await asyncio.gather(*(read() for _ in range(8)))
    assert [text_of(body) for body in bodies] == [words(150)] * 8
    assert any(COMMENT in body for body in bodies)


async def test_a_stream_that_keeps_going_has_none(start, fake):
    running = await start(fake(interval=0.001), keepalive=60.0)
    async with running.http.post(
        running.url + PATH, json={"prompt": "a", "max_tokens": 50, "stream": True}
    ) as response:
        body = await response.text()
    assert (text_of(body), COMMENT in body) == (words(50), False)


async def test_an_error_after_a_pause_is_still_an_event(start, fake):
    running = await start(fake(stall=1, error_after=1), keepalive=0.01)
    reader, writer = await open_stream(running.port, {"prompt": "a"})
    with contextlib.closing(writer):
        await reader.readuntil(KEEP_ALIVE)
        running.engine.go.set()
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert b'"message": "the device is gone"' in rest
    assert b"data: [DONE]" in rest


async def test_a_client_that_leaves_while_they_are_sent(start, fake, caplog):
    """Field note 17, for a stream that pauses."""
    running = await start(fake(stall=1), keepalive=0.001)
    connections = [await open_stream(running.port, {"prompt": "a"}) for _ in range(8)]
    for reader, _ in connections:
        await reader.readuntil(KEEP_ALIVE)
    for _, writer in connections:
        writer.transport.abort()
    async with asyncio.timeout(5):
        await running.idle()
    assert sorted(running.engine.aborted) == sorted(running.engine.ids)
    assert caplog.text == ""


async def test_a_client_that_does_not_read_is_dropped_all_the_same(start, fake):
    """Field note 24: comments neither fill its buffer nor count as its reading."""
    script = [("x" * 20_000, (0,), None)] * 600 + [("end", (1,), "stop")]  # 12 MB
    running = await start(fake(script=script, stall=599), slow_reader_timeout=0.3, keepalive=0.005)
    _, writer = await open_stream(running.port, {"prompt": "a"}, receive_buffer=4096)
    with contextlib.closing(writer):
        writer.transport.pause_reading()
        await until(lambda: running.engine.ids)
        await until(lambda: running.engine.aborted == running.engine.ids)
    running.engine.go.set()
    status, _ = await running.post("/tokenize", {"prompt": "a"})
    assert status == 200


class Sink:
    """A transport and a response: how much is unsent, and what was written."""

    def __init__(self, unsent=0, error=None):
        self.unsent = unsent
        self.error = error
        self.written = []
        self.request = SimpleNamespace(transport=self)

    def get_write_buffer_size(self):
        return self.unsent

    async def write(self, data):
        self.written.append(data)
        if self.error is not None:
            raise self.error


async def test_a_full_buffer_gets_none_until_it_is_empty():
    sink = Sink(unsent=1)
    with KeepAlive(sink.request, sink, 0.005) as keepalive:
        keepalive.wrote()
        await asyncio.sleep(0.05)
        assert sink.written == []
        sink.unsent = 0
        await until(lambda: len(sink.written) >= 2)
    assert set(sink.written) == {KEEP_ALIVE}


async def test_a_lost_connection_ends_them():
    sink = Sink(error=ConnectionResetError())
    with KeepAlive(sink.request, sink, 0.001) as keepalive:
        keepalive.wrote()
        await until(lambda: sink.written)
        await asyncio.sleep(0.02)
    assert sink.written == [KEEP_ALIVE]


async def test_after_the_end_there_are_none():
    """Not even where the watch was due, but had not run: the answer may have been closed."""
    sink = Sink()
    with KeepAlive(sink.request, sink, 1e-9) as keepalive:
        keepalive.wrote()
    await asyncio.sleep(0.02)
    assert sink.written == []


async def test_an_answer_without_events_has_no_watch():
    before = asyncio.all_tasks()
    with KeepAlive(Sink().request, Sink(), 0.001):
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
async def test_the_pause_must_be_positive(fake, seconds):
    with pytest.raises(AssertionError):
        create_app(fake(), keepalive=seconds)


async def test_they_can_be_switched_off(start, fake):
    running = await start(fake(stall=1), keepalive=math.inf)
    reader, writer = await open_stream(running.port, {"prompt": "a", "max_tokens": 2})
    with contextlib.closing(writer):
        await reader.readuntil(b'"w0.0 "')
        await reader.readuntil(b"\n\n\r\n")
        running.engine.go.set()
        assert b"keep-alive" not in await reader.readuntil(b"\r\n0\r\n\r\n")

"""Clients that go away or do not read: their streams are aborted, and nobody else notices."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest


async def open_socket(port, path, body, receive_buffer=None):
    """A raw client, so that a test decides when bytes are read."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    await loop.sock_sendall(sock, head.encode() + raw)
    return sock


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_is_aborted(start, fake, stream, n):
    """Field note 17, for both kinds of answer."""
    running = await start(fake(interval=0.01))
    body = {"prompt": "a", "max_tokens": 400, "stream": stream, "n": n}
    sock = await open_socket(running.port, "/v1/completions", body)
    await until(lambda: running.engine.running)
    await asyncio.sleep(0.05)
    sock.close()
    async with asyncio.timeout(2):
        await running.idle()
    assert running.engine.aborted == running.engine.ids
    assert len(running.engine.ids) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token(start, fake, stream):
    """Field note 19: the request may still wait or compute its prompt."""
    running = await start(fake(stall=0))
    body = {"prompt": ["a", "b"], "max_tokens": 9, "stream": stream}
    sock = await open_socket(running.port, "/v1/completions", body)
    await until(lambda: len(running.engine.running) == 2)
    sock.close()
    async with asyncio.timeout(2):
        await running.idle()
    assert sorted(running.engine.aborted) == sorted(running.engine.ids)


async def test_closing_the_openai_stream_aborts(start, fake):
    running = await start(fake(interval=0.005))
    stream = await running.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=400, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(2):
        await running.idle()
    assert running.engine.aborted == running.engine.ids


async def test_half_of_64_leave_and_the_others_get_all(start, fake):
    running = await start(fake(interval=0.005))
    body = {"prompt": "a", "max_tokens": 40, "stream": True}

    async def stay() -> str:
        return "".join(
            json.loads(event)["choices"][0]["text"]
            for event in await running.events("/v1/completions", body)
            if event != "[DONE]"
        )

    async def leave() -> None:
        async with running.http.post(running.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()

    results = await asyncio.gather(*(stay() if i % 2 else leave() for i in range(64)))
    assert {text for text in results if text} == {"".join(f"w0.{i} " for i in range(40))}
    assert len(running.engine.aborted) == 32
    await running.idle()


async def test_a_client_that_does_not_read_is_dropped_and_others_are_not(start, fake):
    """Field note 24. Both streams pause near their end, until the one that is not read is gone."""
    script = [("x" * 20_000, (0,), None)] * 600 + [("end", (1,), "stop")]  # 12 MB in all
    running = await start(fake(script=script, stall=599), slow_reader_timeout=0.3)
    body = {"prompt": "a", "stream": True}
    sock = await open_socket(running.port, "/v1/completions", body, receive_buffer=4096)
    with contextlib.closing(sock):
        await until(lambda: running.engine.running)
        reader = asyncio.create_task(running.events("/v1/completions", body))
        await until(lambda: running.engine.aborted)
        running.engine.go.set()
        *events, done = await reader
        stalled, read = running.engine.ids
        assert running.engine.aborted == [stalled] != [read]
        assert done == "[DONE]"
        texts = [json.loads(event)["choices"][0]["text"] for event in events]
        assert "".join(texts) == "x" * 12_000_000 + "end"
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := await asyncio.get_running_loop().sock_recv(sock, 65536):
                received += chunk
        assert b"[DONE]" not in received  # its connection has been cut


async def test_a_stalled_reader_of_a_whole_answer_does_not_keep_the_handler(start, fake, caplog):
    script = [("y" * 9_000_000, (1,), "stop")]
    running = await start(fake(script=script), slow_reader_timeout=0.2)
    sock = await open_socket(running.port, "/v1/completions", {"prompt": "a"}, receive_buffer=4096)
    with contextlib.closing(sock):
        await until(lambda: "did not read" in caplog.text)
    status, _ = await running.post("/tokenize", {"prompt": "a"})
    assert status == 200


async def test_an_error_before_the_first_token_is_plain_json(start, fake):
    running = await start(fake(error_after=0))
    for stream in (True, False):
        status, body = await running.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert status == 500
        assert body["error"]["message"] == "the device is gone"
        assert (body["error"]["type"], body["error"]["code"]) == ("server_error", "engine_error")


async def test_an_error_in_mid_stream_is_an_event(start, fake):
    running = await start(fake(error_after=2))
    *chunks, error, done = await running.events("/v1/completions", {"prompt": "a", "stream": True})
    assert len(chunks) == 2
    assert json.loads(error)["error"]["message"] == "the device is gone"
    assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
    assert done == "[DONE]"


async def test_one_of_several_prompts_fails(start, fake):
    running = await start(fake(error_after=1))
    status, _ = await running.post("/v1/completions", {"prompt": ["a", "b"]})
    assert status == 500
    await running.idle()


async def test_the_socket_may_close_between_requests(start):
    running = await start()
    async with (
        aiohttp.ClientSession() as session,
        session.get(running.url + "/health") as response,
    ):
        assert await response.json() == {"status": "ready"}
    status, _ = await running.post("/v1/completions", {"prompt": "a"})
    assert status == 200

"""Start, health, drain and end of a server."""

import asyncio
import json
import os
import signal

import pytest

from jaxserve.server.lifecycle import Server, bind
from scheduler.request import RequestOptions, SamplingParams


async def refused(running):
    status, body = await running.post("/v1/completions", {"prompt": "a"})
    return status, body["error"]["code"]


async def test_loading_then_ready(start, fake):
    """The socket is up while the model loads; /health says so, and requests are refused."""
    announced = []
    engine = fake(current="loading")
    running = await start(engine, on_ready=lambda: announced.append(True))
    async with running.http.get(running.url + "/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "loading"})
    async with running.http.get(running.url + "/v1/models") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    assert await refused(running) == (503, "loading")
    assert announced == []
    engine.current = "ready"
    engine.loaded.set()
    async with running.http.get(running.url + "/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})
    status, _ = await running.post("/v1/completions", {"prompt": "a"})
    assert status == 200
    assert announced == [True]


@pytest.mark.parametrize("state", ["stuck", "failed", "draining"])
async def test_health_tells_what_is_wrong(start, fake, state):
    """Field note 25."""
    running = await start()
    running.engine.current = state
    async with running.http.get(running.url + "/health") as response:
        assert (response.status, await response.json()) == (503, {"status": state})
    assert await refused(running) == (503, state)


async def test_ready_is_only_who_takes_requests(start, fake):
    """A load balancer's question: no while it loads, is stuck, or ends."""
    engine = fake(current="loading", stall=1)
    running = await start(engine)

    async def ready():
        async with running.http.get(running.url + "/ready") as response:
            return response.status, await response.json()

    assert await ready() == (503, {"status": "loading"})
    engine.current = "ready"
    engine.loaded.set()
    assert await ready() == (200, {"status": "ready"})
    engine.current = "stuck"
    assert await ready() == (503, {"status": "stuck"})
    engine.current = "ready"
    stream = asyncio.create_task(
        running.events("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    )
    while not engine.running:
        await asyncio.sleep(0.005)
    running.server.stop()
    assert await ready() == (503, {"status": "draining"})
    engine.go.set()
    assert (await stream)[-1] == "[DONE]"


async def test_a_failed_load_ends_the_server_with_its_error(start, fake):
    engine = fake(current="loading", load_error=FileNotFoundError("no such model"))
    running = await start(engine)
    engine.loaded.set()
    with pytest.raises(FileNotFoundError, match="no such model"):
        await running.task
    assert engine.closed


async def test_drain_lets_running_streams_finish(start, fake):
    """Field note 22."""
    running = await start(fake(interval=0.01), drain_timeout=10)
    body = {"prompt": "a", "max_tokens": 30, "stream": True}
    streams = [asyncio.create_task(running.events("/v1/completions", body)) for _ in range(4)]
    whole = asyncio.create_task(running.post("/v1/completions", {"prompt": "a", "max_tokens": 30}))
    while len(running.engine.running) < 5:
        await asyncio.sleep(0.005)
    running.server.stop()
    assert await refused(running) == (503, "draining")
    async with running.http.get(running.url + "/health") as response:
        assert response.status == 503
    for events in await asyncio.gather(*streams):
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert len(events) == 31
    assert (await whole)[0] == 200
    await running.task
    assert running.engine.closed
    assert running.engine.aborted == []


async def test_drain_timeout_ends_streams_with_abort(start, fake):
    running = await start(fake(stall=3), drain_timeout=0.1)
    body = {"prompt": "a", "max_tokens": 30, "stream": True}
    stream = asyncio.create_task(running.events("/v1/completions", body))
    while not running.engine.running:
        await asyncio.sleep(0.005)
    running.server.stop()
    *_, last, done = await stream
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
    await running.task


async def test_stop_while_loading(start, fake):
    running = await start(fake(current="loading"))
    await asyncio.sleep(0.05)
    running.server.stop()
    await running.task
    assert running.engine.closed


async def test_signals_drain_once_and_then_end_at_once(fake):
    exits = []
    stopped = []
    engine = fake(stall=0)
    server = Server(
        engine,
        bind("127.0.0.1", 0),
        on_stop=lambda: stopped.append(True),
        exit_now=exits.append,
    )
    server.handle_signals()
    task = asyncio.create_task(server.run())
    await asyncio.sleep(0.05)
    params = SamplingParams(max_tokens=1)
    engine.submit([("held", [1])], params, RequestOptions(), arrival=0.0)  # the drain waits for it
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert (stopped, exits) == ([True], [])
    assert not task.done()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.05)
    assert (stopped, exits) == ([True], [130])
    engine.go.set()
    await task
    loop = asyncio.get_running_loop()
    assert loop.remove_signal_handler(signal.SIGTERM)
    assert loop.remove_signal_handler(signal.SIGINT)


def test_a_port_in_use_is_an_error():
    with bind("127.0.0.1", 0) as sock, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", sock.getsockname()[1])


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="assign"):
        bind("192.0.2.1", 0)

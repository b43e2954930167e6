"""The engine on its own thread, driven from an event loop: its states, its ends, and many
clients."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxserve.async_engine import AsyncEngine
from jaxserve.config import ConfigError, EngineConfig, ServerConfig
from jaxserve.server.mailbox import Mailbox
from scheduler.errors import PromptTooLong
from scheduler.request import RequestOptions, SamplingParams

SETTINGS: dict[str, Any] = {"num_pages": 24, "page_size": 8, "max_num_seqs": 4}
SETTINGS |= {"max_num_batched_tokens": 32, "row_buckets": "single", "token_buckets": "single"}


@pytest.fixture
async def engine(tiny_llama: str, compile_cache: str) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=tiny_llama, dtype="float32", compile_cache=compile_cache, **SETTINGS
    )
    engine = AsyncEngine(config, ServerConfig(stuck_timeout=0.2))
    assert engine.state() == "loading"
    engine.start()
    await engine.wait_ready()
    assert engine.state() == "ready"
    yield engine
    await engine.close()


def submit(engine: AsyncEngine, name: str, max_tokens: int, **options: Any) -> Mailbox:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )
    [stream] = engine.submit(
        [(name, [5, 6, 7])], params, RequestOptions(), arrival=time.monotonic()
    )
    return stream


async def read(stream: Mailbox) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for choice, delta in stream:
        tokens.setdefault(choice, []).extend(delta.token_ids)
    return tokens


async def test_many_clients_that_come_and_go(engine: AsyncEngine) -> None:
    """60 requests over a pool that holds a few; a third leaves at a random moment."""
    expected = (await read(submit(engine, "alone", 40)))[0]
    rng = random.Random(1)

    async def client(i: int) -> None:
        await asyncio.sleep(rng.random())
        length, n = rng.randint(1, 40), rng.randint(1, 3)
        stream = submit(engine, f"client-{i}", length, n=n)
        if i % 3 == 0:
            await asyncio.sleep(rng.random() * 0.1)
            stream.abort()
            return
        assert await read(stream) == {choice: expected[:length] for choice in range(n)}

    await asyncio.wait_for(asyncio.gather(*(client(i) for i in range(60))), 120)
    while engine.stats().num_running or engine.stats().num_waiting:
        await asyncio.sleep(0.01)
    assert engine.stats().pages_held == 0
    assert engine.stats().pages_free + engine.stats().pages_cached == 24
    assert engine.stats().compilations["serving"] == 0
    assert not engine._streams


async def test_refusals_are_synchronous_and_change_nothing(engine: AsyncEngine) -> None:
    with pytest.raises(PromptTooLong):
        engine.submit(
            [("short", [5]), ("long", [5] * 300)], SamplingParams(), RequestOptions(), arrival=0.0
        )
    assert not engine._streams


async def test_drain_waits_and_then_aborts(engine: AsyncEngine) -> None:
    short = submit(engine, "short", 3)
    await engine.drain(30)
    assert engine.state() == "draining"
    assert len((await read(short))[0]) == 3
    long = submit(engine, "long", 150)
    await engine.drain(0.01)
    reasons = [delta.finish_reason async for _, delta in long]
    assert reasons[-1] == "abort"


async def test_a_step_that_hangs_is_reported_and_forgiven(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#1492: health must not say 200 while the loop is stuck and work waits."""
    inner = engine._model.engine
    step = inner.step

    def slow() -> Any:
        time.sleep(0.6)
        monkeypatch.setattr(inner, "step", step)
        return step()

    monkeypatch.setattr(inner, "step", slow)
    stream = submit(engine, "slow", 3)
    await asyncio.sleep(0.4)
    assert engine.state() == "stuck"
    assert len((await read(stream))[0]) == 3
    assert engine.state() == "ready"


async def test_a_dead_thread_ends_its_streams(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies() -> Any:
        raise SystemError("the thread is gone")

    monkeypatch.setattr(engine._model.engine, "step", dies)
    stream = submit(engine, "doomed", 3)
    deltas = [delta async for _, delta in stream]
    assert deltas[-1].finish_reason == "error"
    assert "the thread is gone" in (deltas[-1].error or "")
    assert engine.state() == "failed"


async def test_a_model_that_does_not_load_says_why(tiny_llama: str) -> None:
    engine = AsyncEngine(EngineConfig(model=tiny_llama, num_pages=10**9), ServerConfig())
    engine.start()
    with pytest.raises(ConfigError, match="num_pages"):
        await engine.wait_ready()
    assert engine.state() == "failed"
    await engine.close()

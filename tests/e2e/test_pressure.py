"""A server that gets more than it can do: no stream breaks, nobody hangs, no page is forgotten."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.serving import Served, start

PAGES = 128
SHAPES = [f"--num-pages={PAGES}", "--num-host-pages=24"]
FLOOD = [*SHAPES, "--policy=priority", "--admission=fits"]
SHORT_QUEUE = [*SHAPES, "--max-waiting=3", "--admission=reserve-max"]
# the command line, on a machine whose copies are free: a preempted row is swapped while there is
# room in host memory, and computed again when there is none
SWAPPING = """
import sys
from jaxserve.runtime.runner import DeviceRunner
from scheduler.preemption import PreemptionCosts
measure = DeviceRunner._measure
DeviceRunner._measure = lambda self: (measure(self), PreemptionCosts())[1]
from jaxserve.cli import main
sys.exit(main())
"""
# and with steps so slow that a client can see what happens between two of them
SLOW = """
import sys, time
from jaxserve.runtime.runner import DeviceRunner
submit = DeviceRunner.submit
DeviceRunner.submit = lambda self, step: (time.sleep(0.004), submit(self, step))[1]
from jaxserve.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def served(tiny_llama: str, compile_cache: str) -> Iterator[Served]:
    served = start(tiny_llama, compile_cache, *FLOOD, program=["-c", SWAPPING])
    yield served
    served.stop()


def ask(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | more


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    error: dict[str, Any] | None = None
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, body: dict[str, Any]) -> None:
        assert "error" not in body, f"a stream broke: {body}"
        for choice in body["choices"]:
            index = choice["index"]
            assert index not in self.reasons, "something came after the end"
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]


class Crowd:
    """Clients of one server, none of which waits for another."""

    def __init__(self, url: str, http: aiohttp.ClientSession):
        self.url = f"{url}/v1/completions"
        self.http = http

    async def post(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        """The whole answer, streamed or not."""
        async with self.http.post(self.url, json=body, headers=headers) as response:
            answer = Answer(response.status, dict(response.headers))
            if response.status != 200:
                answer.error = (await response.json())["error"]
            elif body.get("stream"):
                lines = [line async for line in response.content if line.startswith(b"data: ")]
                assert lines[-1] == b"data: [DONE]\n", "the stream has no end"
                for line in lines[:-1]:
                    answer.add(json.loads(line.removeprefix(b"data: ")))
            else:
                answer.add(await response.json())
            if response.status == 200:
                assert len(answer.reasons) == body.get("n", 1), "a choice has no end"
            return answer

    async def leave(self, body: dict[str, Any], num_bytes: int) -> None:
        """A client that goes away in the middle of its stream."""
        async with self.http.post(self.url, json=body | {"stream": True}) as response:
            assert response.status == 200
            await response.content.readexactly(num_bytes)
            response.close()


@asynccontextmanager
async def crowd(served: Served) -> AsyncIterator[Crowd]:
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited) as http:
        yield Crowd(served.url, http)


async def until(served: Served, name: str, value: float, *clients: asyncio.Task[Answer]) -> None:
    """Wait until a gauge is at least that, while these clients have no answer yet."""
    end = time.monotonic() + 20
    while (metrics := await asyncio.to_thread(served.metrics))[name] < value:
        over = [client.result() for client in clients if client.done()]
        assert not over, f"{name} has not come to {value} before {over}"
        assert time.monotonic() < end, f"{name} does not come to {value}: {metrics}"
        await asyncio.sleep(0.01)


def sums(metrics: dict[str, float], family: str) -> float:
    return sum(value for name, value in metrics.items() if name.startswith(family + "_total"))


# ---- the flood ----


async def test_a_flood_breaks_no_stream_and_loses_no_page(served: Served) -> None:
    """vllm#10583, vllm#31503, vllm#45704 and more: 200 clients over 128 pages that stream, wait,
    leave, time out, want several choices, have priorities, and use each other's request ids."""
    cases = [ask([10 + i, *range(30, 30 + 9 * i)], 40 + 13 * i) for i in range(6)]
    outcomes: Counter[str] = Counter()
    sequences = 0

    async with crowd(served) as clients:

        async def client(i: int, solo: list[Answer]) -> int:
            """Returns how many sequences it has started."""
            await asyncio.sleep(i % 20 * 0.02)
            case, expected = cases[i % 6], solo[i % 6].texts[0]
            body = case | {"priority": i % 3 - 1, "stream": i % 4 != 0}
            kind = i % 10
            if kind == 0:
                await clients.leave(body, 200 + i)
                outcomes["left"] += 1
                return 1
            if kind == 1:
                body |= {"timeout": 0.05 * (1 + i // 10)}
            if kind == 2:
                body |= {"n": 3}
            if kind == 3:
                body |= {"request_id": "the-same"}
            answer = await clients.post(body)
            if answer.status == 504:
                assert kind == 1
                assert answer.error is not None
                assert answer.error["code"] == "timeout"
                outcomes["504"] += 1
                return 1
            assert answer.status == 200
            for choice, text in answer.texts.items():
                reason = answer.reasons[choice]
                outcomes[reason] += 1
                assert reason == "length" or (kind, reason) == (1, "timeout")
                assert text == expected or (reason == "timeout" and expected.startswith(text))
            return body.get("n", 1)

        before = await asyncio.to_thread(served.wait_idle)
        solo = [await clients.post(case) for case in cases]
        sequences = len(solo) + sum(await asyncio.gather(*(client(i, solo) for i in range(200))))
    after = await asyncio.to_thread(served.wait_idle)
    assert after["kv_pages{free}"] + after["kv_pages{cached}"] == PAGES
    moved = {name: value - before[name] for name, value in after.items() if name in before}
    assert moved["request_finished_total{error}"] == 0
    assert moved["request_finished_total{abort}"] == outcomes["left"] == 20
    timeouts = outcomes["timeout"] + outcomes["504"]
    assert moved["request_finished_total{timeout}"] == timeouts
    assert sums(moved, "request_finished") == sequences == 200 + 2 * 20 + len(cases)
    # it was one
    assert timeouts > 0
    assert moved["preemptions_total{swap}"] > 0
    assert moved["pages_copied_total{out}"] > 0
    assert moved["pages_copied_total{back}"] > 0
    assert moved["prefix_tokens_total{hit}"] > 0
    assert after["kv_pages_reserved"] == 0
    assert served.get("/health") == (200, '{"status": "ready"}')


async def test_swapped_streams_say_what_they_say_alone(served: Served) -> None:
    """vllm#16832, vllm#45704. Sixteen of up to 29 pages each, over 128 pages and 24 on the host."""
    bodies = [ask([100 + i] * (1 + i), 200 + i, stream=True) for i in range(16)]
    before = await asyncio.to_thread(served.wait_idle)
    async with crowd(served) as clients:
        together = await asyncio.gather(*(clients.post(body) for body in bodies))
        after = await asyncio.to_thread(served.wait_idle)
        solo = [await clients.post(body) for body in bodies[::5]]
    assert [answer.texts for answer in together[::5]] == [answer.texts for answer in solo]
    for name in ("preemptions_total{swap}", "pages_copied_total{out}", "pages_copied_total{back}"):
        assert after[name] > before[name]


async def test_a_prompt_that_was_seen_before_is_not_computed_again(served: Served) -> None:
    await asyncio.to_thread(served.wait_idle)
    body = ask([7, *range(200, 239)], 20)
    async with crowd(served) as clients:
        first = await clients.post(body)
        before = served.metrics()
        second = await clients.post(body)
    after = served.metrics()
    assert second.texts == first.texts
    name = "prefix_tokens_total"
    moved = {
        kind: after[f"{name}{{{kind}}}"] - before[f"{name}{{{kind}}}"]
        for kind in ("queried", "hit")
    }
    assert moved == {"queried": 40, "hit": 32}, "four pages of eight; the last one has a new token"


# ---- priorities and deadlines ----


async def test_an_important_request_overtakes_those_that_run(served: Served) -> None:
    """vllm#40004."""
    before = await asyncio.to_thread(served.wait_idle)
    async with crowd(served) as clients:
        crowded = asyncio.create_task(clients.post(ask([3], 200, n=60, priority=5)))
        await until(served, "num_requests_running", 8, crowded)
        answer = await clients.post(ask([4, 5], 4, priority=-5))
        assert answer.reasons == {0: "length"}
        assert not crowded.done()
        crowded.cancel()
    after = await asyncio.to_thread(served.wait_idle)
    assert sums(after, "preemptions") > sums(before, "preemptions")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_waits_past_its_deadline_is_504(served: Served, stream: bool) -> None:
    await asyncio.to_thread(served.wait_idle)
    async with crowd(served) as clients:
        crowded = asyncio.create_task(clients.post(ask([3], 200, n=60, priority=-5)))
        await until(served, "num_requests_waiting", 1, crowded)
        answer = await clients.post(ask([4], 4, stream=stream), {"X-Request-Timeout": "0.1"})
        assert not crowded.done()
        assert answer.status == 504
        assert answer.error is not None
        assert (answer.error["code"], answer.error["param"]) == ("timeout", "timeout")
        assert "0.1 s" in answer.error["message"]
        assert answer.headers["X-Should-Retry"] == "false"
        crowded.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_runs_past_its_deadline_has_what_it_has(
    served: Served, stream: bool
) -> None:
    body = ask([4, 9], 240, n=8, stream=stream)
    async with crowd(served) as clients:
        began = time.monotonic()
        answer = whole = await clients.post(body)
        timeout = (time.monotonic() - began) / 2
        for _ in range(10):
            answer = await clients.post(body, {"X-Request-Timeout": f"{timeout:.3f}"})
            if "timeout" in answer.reasons.values():
                break
            timeout *= 1.5 if answer.status == 504 else 0.7  # the machine has changed its pace
    assert answer.status == 200
    assert set(answer.reasons.values()) == {"timeout"}
    for choice, text in answer.texts.items():
        assert whole.texts[choice].startswith(text)
        assert 0 < len(text) < len(whole.texts[choice])
    metrics = await asyncio.to_thread(served.wait_idle)
    assert metrics["kv_pages{free}"] + metrics["kv_pages{cached}"] == PAGES


# ---- a second start, a short queue, and the end ----


@pytest.fixture(scope="module")
def restarted(served: Served, tiny_llama: str, compile_cache: str) -> Iterator[Served]:
    """Of the same shapes as the first one, so that all its programs are in the cache."""
    programs = sorted(Path(compile_cache).glob("*-cache"))
    restarted = start(tiny_llama, compile_cache, *SHORT_QUEUE, program=["-c", SLOW])
    assert programs == sorted(Path(compile_cache).glob("*-cache"))
    assert programs
    yield restarted
    restarted.stop()


async def test_programs_from_the_cache_say_the_same(served: Served, restarted: Served) -> None:
    """tpu-inference#606: the cache was not used. tpu-inference PR#1895: it gave the program of
    another graph, with and without logprobs."""
    bodies = [
        ask([3, 1, 4], 30),
        ask([3, 1, 4], 30, logprobs=3),
        ask([3, 1, 4], 30, temperature=1.2, seed=5),
        ask([3, 1, 4], 30, temperature=1.2, seed=5, logprobs=0, top_k=9),
    ]
    said: list[list[Answer]] = []
    for server in (served, restarted):
        async with crowd(server) as clients:
            said.append([await clients.post(body) for body in bodies])
    for cold, warm in zip(*said, strict=True):
        assert (cold.texts, cold.reasons) == (warm.texts, warm.reasons)
    assert said[1][0].texts == said[1][1].texts != said[1][2].texts


async def refused(clients: Crowd, body: dict[str, Any], status: int, code: str) -> Answer:
    answer = await clients.post(body)
    assert answer.error is not None
    assert (answer.status, answer.error["code"]) == (status, code)
    return answer


async def test_a_short_queue_refuses_and_a_signal_lets_the_rest_end(restarted: Served) -> None:
    """vllm#2901: 429 with Retry-After. vllm PR#53936: all choices or none. vllm#24885: SIGTERM in
    the middle of a burst. (The server has ended after this test.)"""
    body = ask([5, 6], 250, stream=True)  # a quarter of the pool each
    async with crowd(restarted) as clients:
        await refused(clients, ask([1], 4, priority=1), 400, "unsupported_parameter")
        streams = [asyncio.create_task(clients.post(body)) for _ in range(5)]
        await until(restarted, "num_requests_waiting", 1, *streams)
        streams.append(asyncio.create_task(clients.post(body)))
        await until(restarted, "num_requests_waiting", 2, *streams)
        answer = await refused(clients, ask([1], 4, n=2), 429, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        streams.append(asyncio.create_task(clients.post(body)))
        await until(restarted, "num_requests_waiting", 3, *streams)
        await refused(clients, ask([1], 4), 429, "queue_full")
        metrics = restarted.metrics()
        assert metrics["requests_refused_total{requests}"] == 2
        assert metrics["num_requests_running"] + metrics["num_requests_waiting"] == 7

        restarted.process.send_signal(signal.SIGTERM)
        while restarted.get("/health")[0] == 200:
            await asyncio.sleep(0.005)
        answer = await refused(clients, ask([1], 4), 503, "draining")
        assert "Retry-After" in answer.headers
        answers = await asyncio.gather(*streams)
    assert [answer.reasons for answer in answers] == [{0: "length"}] * 7
    assert len({answer.texts[0] for answer in answers}) == 1
    assert restarted.process.wait(20) == 0

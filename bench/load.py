"""The client's side of a load test: streaming requests that are sent when they are due, whatever
became of the ones before (open loop), or in groups, as engines with static batches do.

Knows HTTP and the clock; nothing of engines. Every answer is followed to its end and checked letter
by letter (see bench/scripted.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.scripted import STOP, script
from scheduler.pages import pages_for
from scheduler.workload import Trace

# ---- one request ----


@dataclass(slots=True)
class Answer:
    """A request and what came back. Times are seconds from the load's start."""

    due: float
    prompt_tokens: int
    length: int  # tokens that the model would make
    limit: int  # max_tokens
    sent: float = math.nan
    status: int = 0  # of HTTP; 0: there was no answer
    retry_after: str | None = None  # the header
    times: list[float] = field(default_factory=list[float])  # of each token
    text: str = ""
    finish_reason: str | None = None
    fault: str | None = None  # an error in the stream, or of the connection
    ended: float = math.nan  # NaN: it was cut off while it waited or ran

    @property
    def tokens(self) -> int:
        """What it is to have at its end."""
        return min(self.length, self.limit)

    @property
    def whole(self) -> bool:
        """It ended as it should, and every letter is there."""
        stops = self.length <= self.limit
        letters = self.tokens - stops
        return (
            self.finish_reason == ("stop" if stops else "length")
            and self.fault is None
            and self.text == "".join(map(script, range(letters)))
        )

    @property
    def refused(self) -> bool:
        """With one of the statuses that a server under pressure answers with on purpose."""
        return self.status in (429, 503, 504)

    @property
    def broken(self) -> bool:
        """It was answered, and neither whole nor refused."""
        return not math.isnan(self.ended) and not self.whole and not self.refused


def answers_of(trace: Trace) -> list[Answer]:
    columns = (trace.arrival, trace.prompt_tokens, trace.output_tokens, trace.max_tokens)
    return [Answer(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


@dataclass(slots=True)
class Client:
    """Sends requests to one server. `start`: the time (time.monotonic) that all others count from.
    letters: token ids that prompts are made of."""

    session: aiohttp.ClientSession
    url: str
    letters: Sequence[int]
    start: float = 0.0

    def now(self) -> float:
        return time.monotonic() - self.start

    async def ask(self, answer: Answer, number: int) -> None:
        """Stream one answer. Never raises: what went wrong is in it."""
        ids = np.random.default_rng(number).choice(self.letters, answer.prompt_tokens - 1)
        body = {
            "prompt": [answer.length, *ids.tolist()],
            "max_tokens": answer.limit,
            "temperature": 0,
            "ignore_eos": True,
            "stop_token_ids": [STOP],
            "stream": True,
        }
        answer.sent = self.now()
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                answer.status = response.status
                answer.retry_after = response.headers.get("Retry-After")
                if response.status == 200:
                    await self._read(response.content, answer)
                else:
                    answer.fault = (await response.text())[:200]
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            answer.fault = repr(error)
        answer.ended = self.now()

    async def _read(self, stream: aiohttp.StreamReader, answer: Answer) -> None:
        done = False
        async for line in stream:
            if not line.startswith(b"data: "):
                continue  # blank, or a comment that keeps the connection alive
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                answer.fault = str(event["error"]["message"])
                continue
            [choice] = event["choices"]
            text = choice["text"]
            answer.text += text
            answer.finish_reason = choice["finish_reason"]
            tokens = len(text) + (answer.finish_reason == "stop")
            answer.times += [self.now()] * tokens
        if not done and answer.fault is None:
            answer.fault = "the stream ended without [DONE]"


# ---- many ----


@dataclass(frozen=True, slots=True)
class Grouping:
    """Requests are sent in groups, the next one when all of a group have ended: static batching,
    where a group waits until it is full; with a window, dynamic batching as in TensorFlow Serving
    (max_batch_size, batch_timeout): one that is not full goes when its oldest request has waited so
    long. Full: `rows` requests, or `pages` pages at their limits, so that none is ever preempted.

    Kinder than what it stands for: rows end when they are complete, and nothing is padded.
    """

    rows: int
    pages: int
    page_size: int
    window: float = math.inf  # seconds

    def next(self, waiting: Sequence[Answer], now: float) -> int:
        """How many of those that wait, oldest first, go now; 0: not yet."""
        count = pages = 0
        for answer in waiting[: self.rows]:
            pages += pages_for(answer.prompt_tokens + answer.limit, self.page_size)
            if pages > self.pages:
                break
            count += 1
        assert count or not waiting, "a request that fits no group"
        is_full = count == self.rows or count < len(waiting)
        return count if is_full or now >= self.wake(waiting) else 0

    def wake(self, waiting: Sequence[Answer]) -> float:
        """When the window of the oldest is over; inf: only with further requests."""
        return waiting[0].due + self.window if waiting else math.inf


async def send(
    client: Client, answers: Sequence[Answer], until: float, grouping: Grouping | None = None
) -> None:
    """Send each when it is due, or in groups, and follow them to their ends. Those that have not
    ended `until` (seconds) are cut off, as by clients that leave."""
    client.start = time.monotonic()
    work = _open(client, answers) if grouping is None else _grouped(client, answers, grouping)
    with suppress(TimeoutError):
        async with asyncio.timeout(until):
            await work


async def _open(client: Client, answers: Sequence[Answer]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, answer in enumerate(answers):
            await asyncio.sleep(answer.due - client.now())
            tasks.create_task(client.ask(answer, number))


async def _grouped(client: Client, answers: Sequence[Answer], grouping: Grouping) -> None:
    first = last = 0  # of those that are due and have not been sent
    while first < len(answers):
        now = client.now()
        while last < len(answers) and answers[last].due <= now:
            last += 1
        count = grouping.next(answers[first:last], now)
        if count:
            group = range(first, first + count)
            await asyncio.gather(*(client.ask(answers[number], number) for number in group))
            first += count
        else:
            due = answers[last].due if last < len(answers) else math.inf
            wake = min(due, grouping.wake(answers[first:last]))
            await asyncio.sleep(min(wake - now, 3600.0))


# ---- watching ----


Gauges = dict[str, float]  # by name, or name{label value}; without the prefix jaxserve_


@asynccontextmanager
async def watch(client: Client, seen: list[Gauges], every: float = 0.5) -> AsyncIterator[None]:
    """Read the server's metrics every so many seconds into `seen`, with their time as "at"."""

    async def look() -> None:
        while True:
            seen.append(await read_metrics(client))
            await asyncio.sleep(every)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def read_metrics(client: Client) -> Gauges:
    async with client.session.get(f"{client.url}/metrics") as response:
        text = await response.text()
    found: Gauges = {"at": client.now()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = "".join(f"{{{value}}}" for value in sample.labels.values())
            found[sample.name.removeprefix("jaxserve_") + labels] = sample.value
    return found


async def wait_idle(client: Client, seconds: float = 30.0) -> Gauges:
    """The metrics once nothing runs or waits. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            found = await read_metrics(client)
            if not found["num_requests_running"] + found["num_requests_waiting"]:
                return found
            await asyncio.sleep(0.05)

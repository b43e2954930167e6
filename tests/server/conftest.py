"""A scripted engine behind the server's client interface, and a real server on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest

from jaxserve.outputs import Delta, Logprob
from jaxserve.server.lifecycle import Server, bind
from jaxserve.server.mailbox import Mailbox
from scheduler.errors import InvalidParameter, PromptTooLong, QueueFull
from scheduler.request import RequestOptions, SamplingParams
from scheduler.stats import Stats

VOCAB = 256
LIMIT = 64  # sequences at once


def word(choice: int, i: int) -> str:
    return f"w{choice}.{i} "


@dataclass
class FakeEngine:
    """Gives the i-th token of choice c the text word(c, i), or what `script` says.

    script: (text, token ids, finish reason) per delta, for every choice. A prompt's tokens are its
    UTF-8 bytes. `stall` keeps it from going on after that many deltas until `go` is set.
    timeouts: choice, counted over all prompts -> how many deltas it gets before its deadline.
    """

    interval: float = 0.0  # seconds between tokens
    script: list[tuple[str, tuple[int, ...], str | None]] | None = None
    stall: int | None = None
    error_after: int | None = None  # deltas before the engine gives up
    timeouts: dict[int, int] = field(default_factory=dict)
    retry_after: float = 2.0  # seconds, what a full queue says
    load_error: Exception | None = None
    model_name: str = "fake"
    max_model_len: int = 512
    vocab_size: int = VOCAB
    current: str = "ready"
    numbers: Stats = field(default_factory=Stats)
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    options: list[RequestOptions] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)  # request id -> choices
    closed: bool = False

    def __post_init__(self) -> None:
        self.loaded = asyncio.Event()
        self.go = asyncio.Event()
        self.finish_now = False
        self.tasks: set[asyncio.Task[None]] = set()
        if self.current == "ready":
            self.loaded.set()

    def state(self) -> str:
        return self.current

    async def wait_ready(self) -> None:
        await self.loaded.wait()
        if self.load_error is not None:
            raise self.load_error

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def render_chat(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        self.messages = messages
        if messages[0]["role"] == "assistant":
            raise InvalidParameter("messages", "the conversation must begin with the user")
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def submit(
        self,
        requests: Sequence[tuple[str, list[int]]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        arrival: float,
    ) -> list[Mailbox]:
        for _, prompt_ids in requests:
            if len(prompt_ids) >= self.max_model_len:
                raise PromptTooLong(len(prompt_ids), self.max_model_len)
        if sum(self.running.values()) + params.n * len(requests) > LIMIT:
            raise QueueFull("requests", f"{LIMIT} requests wait", self.retry_after)
        self.params.append(params)
        self.options.append(options)
        self.arrivals.append(arrival)
        return [self._add(i, *request, params) for i, request in enumerate(requests)]

    def _add(
        self, number: int, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> Mailbox:
        assert request_id not in self.running
        self.ids.append(request_id)
        self.prompts.append(prompt_ids)
        self.running[request_id] = params.n
        mailbox = Mailbox(params.n, lambda: self._abort(request_id))
        task = asyncio.create_task(self._run(request_id, number, prompt_ids, params, mailbox))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return mailbox

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id)

    async def _run(
        self,
        request_id: str,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        mailbox: Mailbox,
    ) -> None:
        last = {c: self.timeouts.get(number * params.n + c) for c in range(params.n)}
        for i, deltas in enumerate(self._steps(prompt, params)):
            if self.stall is not None and i >= self.stall:
                await self.go.wait()
            await asyncio.sleep(self.interval)
            if request_id not in self.running:
                return
            for choice, delta in enumerate(deltas):
                end = last[choice]
                if end is not None and i > end:
                    continue
                if self.error_after is not None and i >= self.error_after:
                    delta = Delta("", "", (), finish_reason="error", error="the device is gone")
                elif self.finish_now:
                    delta = Delta("", "", (), finish_reason="abort", num_output_tokens=i)
                elif i == end:
                    seen = self._seen(i)
                    delta = Delta("", "", (), finish_reason="timeout", num_output_tokens=seen)
                mailbox.put(choice, delta)
            failed = self.error_after is not None and i >= self.error_after
            late = all(end is not None and i >= end for end in last.values())
            if self.finish_now or failed or late:
                break
        del self.running[request_id]

    def _steps(self, prompt: list[int], params: SamplingParams) -> list[list[Delta]]:
        return [
            [self._delta(step, choice, prompt, params) for choice in range(params.n)]
            for step in range(len(self.script) if self.script else params.max_tokens or 8)
        ]

    def _delta(self, i: int, choice: int, prompt: list[int], params: SamplingParams) -> Delta:
        last = i + 1 == (params.max_tokens or 8)
        text, ids, reason = word(choice, i), (i % VOCAB,), "length" if last else None
        if self.script is not None:
            text, ids, reason = self.script[i]
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(self._logprobs(token, text, params.logprobs) for token in ids)
        return Delta(
            request_id="",
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason="END" if reason == "stop" else None,
            num_prompt_tokens=len(prompt),
            num_output_tokens=self._seen(i + 1),
        )

    def _seen(self, deltas: int) -> int:
        """Tokens in that many deltas."""
        return sum(len(step[1]) for step in self.script[:deltas]) if self.script else deltas

    def _logprobs(self, token: int, text: str, count: int) -> dict[int, Logprob]:
        """The chosen token ranks third: beside the top two, among the top three."""
        others = {
            1000 + rank: Logprob(-rank / 4, rank, f"top{rank}", f"top{rank}".encode())
            for rank in range(1, count + 1)
            if rank != 3
        }
        return {token: Logprob(-0.75, 3, text, text.encode())} | others

    def stats(self) -> Stats:
        return self.numbers

    async def drain(self, timeout: float) -> None:
        self.current = "draining"
        waiting = {task for task in self.tasks if not task.done()}
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
        self.finish_now = True
        self.go.set()
        if waiting:
            await asyncio.wait(waiting)

    async def close(self) -> None:
        self.closed = True
        for task in list(self.tasks):
            task.cancel()


@dataclass
class Running:
    """A server that runs, and three ways to talk to it."""

    engine: FakeEngine
    server: Server
    url: str
    port: int
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI
    task: asyncio.Task[None]

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of every server-sent event of a stream."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            raw = await response.text()
        events = raw.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def idle(self) -> None:
        """Until the engine runs nothing: what a client that left has to bring about."""
        while self.engine.running:
            await asyncio.sleep(0.005)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """start(engine, **server options) -> Running; stopped at the end of the test."""
    everything: list[Running] = []

    async def begin(engine: FakeEngine | None = None, **options: Any) -> Running:
        engine = engine or FakeEngine()
        sock: socket.socket = bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        server = Server(engine, sock, **options)
        task = asyncio.create_task(server.run())
        http = aiohttp.ClientSession()
        url = f"http://127.0.0.1:{port}"
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        running = Running(engine, server, url, port, http, client, task)
        everything.append(running)
        return running

    yield begin
    for running in everything:
        running.engine.finish_now = True
        running.engine.go.set()
        await running.client.close()
        await running.http.close()
        if not running.task.done():
            running.server.stop()
        with suppress(Exception):  # a test that expects a failure has seen it
            await running.task


@pytest.fixture
def fake() -> type[FakeEngine]:
    return FakeEngine

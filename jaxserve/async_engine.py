"""AsyncEngine: an Engine on its own thread, behind the interface that the server knows
(EngineClient).

Commands go in through a queue; what a step made comes out with one call_soon_threadsafe per step.
The event loop never waits for a step, and the engine's thread never runs event-loop code.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine import Engine
from jaxserve.loading import LoadedModel, load_model, no_progress
from jaxserve.outputs import Delta
from jaxserve.runtime.weights import Progress
from jaxserve.server.client import State
from jaxserve.server.mailbox import Mailbox
from scheduler.request import Request, RequestOptions, SamplingParams
from scheduler.stats import Stats

log = logging.getLogger(__name__)

Command = Callable[[], None]

ABORT_TIMEOUT = 10.0  # seconds that a step may take to end when everything is being stopped


# a server's queue is never unbounded: who waits behind this many has left before its turn
DEFAULT_MAX_WAITING = 1024
DEFAULT_MAX_WAITING_TOKENS = 1 << 20


class LoadingStopped(Exception):
    """The server was stopped before its model was ready."""


class AsyncEngine:
    """Created anywhere; start() inside the event loop that will read the streams."""

    def __init__(
        self,
        config: EngineConfig,
        server_config: ServerConfig,
        progress: Progress = no_progress,
    ):
        if config.max_waiting is None:
            config = replace(config, max_waiting=DEFAULT_MAX_WAITING)
        if config.max_waiting_tokens is None:
            config = replace(config, max_waiting_tokens=DEFAULT_MAX_WAITING_TOKENS)
        self._config = config
        self._stuck_timeout = server_config.stuck_timeout
        self._progress = progress
        self._loaded: LoadedModel | None = None
        self._failure: BaseException | None = None
        self._draining = False
        self._closed = False
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._num_queued = 0  # sequences between submit() and the scheduler,
        self._tokens_queued = 0  # and their prompt tokens
        self._queue_lock = threading.Lock()
        self._streams: dict[str, tuple[Mailbox, int]] = {}  # sequence id -> mailbox, choice
        self._step_began: float | None = None  # time.monotonic of the step that runs, if one does
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load on the engine's thread; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread.start()

    # ---- EngineClient ----

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._model.engine.vocab_size

    @property
    def _model(self) -> LoadedModel:
        assert self._loaded is not None, "the model is still loading"
        return self._loaded

    def state(self) -> State:
        if self._failure is not None:
            return "failed"
        if self._loaded is None:
            return "loading"
        began = self._step_began
        if began is not None and time.monotonic() - began > self._stuck_timeout:
            return "stuck"
        return "draining" if self._draining else "ready"

    async def wait_ready(self) -> None:
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def encode(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        return self._model.tokenizer.decode(token_ids, skip_special_tokens=False)

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        return self._model.tokenizer.render_chat(messages, tools=tools)

    def submit(
        self,
        requests: Sequence[tuple[str, list[int]]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        arrival: float,
    ) -> list[Mailbox]:
        engine = self._model.engine
        by_prompt = [
            engine.requests(request_id, prompt_ids, params, arrival, options)
            for request_id, prompt_ids in requests
        ]
        everything = [request for choices in by_prompt for request in choices]
        engine.check_queue(everything, self._num_queued, self._tokens_queued)
        return [self._submit(engine, choices) for choices in by_prompt]

    def _submit(self, engine: Engine, requests: list[Request]) -> Mailbox:
        """Send the choices of one prompt to the engine's thread."""
        names = [request.request_id for request in requests]

        def abort() -> None:
            for name in names:
                self._streams.pop(name, None)
            self._set_idle()
            self._abort(engine, names)

        num_tokens = sum(len(request.prompt) for request in requests)

        def add() -> None:
            with self._queue_lock:
                self._num_queued -= len(requests)
                self._tokens_queued -= num_tokens
            for request in requests:
                engine.add(request)

        mailbox = Mailbox(len(requests), abort)
        for choice, name in enumerate(names):
            self._streams[name] = (mailbox, choice)
        with self._queue_lock:
            self._num_queued += len(requests)
            self._tokens_queued += num_tokens
        self._idle.clear()
        self._commands.put(add)
        return mailbox

    @property
    def memory(self) -> str:
        """What is held on the device, in words."""
        return str(self._model.runner.memory)

    def stats(self) -> Stats:
        return self._loaded.stats if self._loaded else Stats()

    async def drain(self, timeout: float) -> None:
        """Wait until all streams have ended; after `timeout` seconds, end them with "abort"."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            names = list(self._streams)
            log.warning("drain timeout: %d streams are aborted", len(names))
            self._abort(self._model.engine, names)
            with suppress(TimeoutError):  # the engine is stuck: its streams end with the process
                await asyncio.wait_for(self._idle.wait(), ABORT_TIMEOUT)

    async def close(self) -> None:
        """Stop the thread after the step that runs, or the compile job."""
        self._closed = True
        self._commands.put(None)
        if self._loaded is not None:
            await asyncio.to_thread(self._thread.join, ABORT_TIMEOUT)
        if self._loaded is not None:
            self._loaded.runner.close()

    def _abort(self, engine: Engine, names: list[str]) -> None:
        def command() -> None:
            for name in names:
                engine.abort(name)

        self._commands.put(command)

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            self._loaded = load_model(self._config, self._report)
            self._call(self._ready.set)
            self._serve(self._loaded)
        except BaseException as error:
            self._failure = error
            if self._loaded is not None:
                log.critical("the engine stopped", exc_info=error)
            self._call(self._fail, error)

    def _report(self, phase: str, done: int, total: int, note: str) -> None:
        if self._closed:
            raise LoadingStopped
        self._progress(phase, done, total, note)

    def _serve(self, loaded: LoadedModel) -> None:
        engine = loaded.engine
        while True:
            while not (engine.has_work and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    return
                command()
            self._step_began = time.monotonic()
            deltas = engine.step()
            self._step_began = None
            if not engine.has_work:
                engine.scheduler.check_invariants()
            if deltas:
                self._call(self._deliver, deltas)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop has closed")

    # ---- on the event loop ----

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            entry = self._streams.get(delta.request_id)
            if entry is not None:
                mailbox, choice = entry
                if delta.finish_reason is not None:
                    del self._streams[delta.request_id]
                mailbox.put(choice, delta)
        self._set_idle()

    def _set_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    def _fail(self, error: BaseException) -> None:
        """The engine's thread has ended: no stream may wait for it."""
        self._deliver(
            [
                Delta(name, "", (), finish_reason="error", error=f"the engine stopped: {error}")
                for name in list(self._streams)
            ]
        )
        self._ready.set()

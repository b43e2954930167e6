"""A jaxserve server whose answers are as long as their prompts say. The rest is real: the model's
steps, the scheduler, the engine's thread, HTTP.

    python bench/scripted.py '{"engine": {"num_pages": 192}, "pace": 0.0}'

The first token id of a prompt is the number of tokens that its answer will have. Every sampled
token is replaced by the next letter of the alphabet, so that a client sees if one is lost, and the
last one by STOP. The scheduler learns of the length when the answer ends, and not before.

Talks in lines of JSON. It says {"url", "letters"} when it is ready (the letters' token ids). For
every line of Rules on stdin a new scheduler takes over from the one before, which must be idle
(what was learnt of lengths is kept), and the answer is {"most_preemptions"}: of one request since
the last such line. The end of stdin ends the server as SIGTERM would.

engine: settings of EngineConfig. pace: seconds that a step takes at least, for a model that would
be too fast to overload.
"""

from __future__ import annotations

import asyncio
import json
import string
import sys
import time
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.rules import Rules
from jaxserve.async_engine import AsyncEngine
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.loading import LoadedModel
from jaxserve.runtime.runner import Handle, Runner, StepResult
from jaxserve.server.lifecycle import Server, bind
from jaxserve.terminal import address
from scheduler.core import Scheduler
from scheduler.lengths import Oracle, Profiled
from scheduler.request import Request
from scheduler.step import Step

STOP = 2  # the end token of the bundled model; any id that is not a letter would do


def script(position: int) -> str:
    """The letter at this place of an answer."""
    return string.ascii_lowercase[position % 26]


class Script(Oracle):
    """Reads a length where the client wrote it."""

    def __init__(self) -> None:
        super().__init__({})

    def profile(self, request: Request) -> int:
        return int(request.prompt[0])


class ScriptedRunner:
    """A Runner that runs every step, and then says something else."""

    def __init__(self, runner: Runner, letters: Items[int], pace: float):
        self.most_preemptions = 0
        self._runner = runner
        self._letters = letters
        self._pace = pace
        self._free_at = 0.0  # seconds, when the paced device is

    def submit(self, step: Step) -> Handle:
        said: list[tuple[int, int]] = []
        for row, sequence in step.sampled:
            self.most_preemptions = max(self.most_preemptions, sequence.num_preemptions)
            position = sequence.num_output - 1  # this token is among its pending ones already
            last = position + 1 >= int(sequence.request.prompt[0])
            said.append((row, STOP if last else self._letters[position % 26]))
        self._free_at = max(self._free_at, time.monotonic()) + self._pace
        return _Scripted(self._runner.submit(step), said, self._free_at)

    def reset(self) -> None:
        self._runner.reset()

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True, slots=True)
class _Scripted:
    handle: Handle
    said: list[tuple[int, int]]  # (row, token)
    free_at: float  # seconds

    def result(self) -> StepResult:
        result = self.handle.result()
        time.sleep(max(0.0, self.free_at - time.monotonic()))
        tokens = result.tokens.copy()
        for row, token in self.said:
            tokens[row] = token
        return replace(result, tokens=tokens)


class ScriptedEngine(AsyncEngine):
    """An AsyncEngine over a ScriptedRunner, whose scheduler can be changed while it is idle."""

    def __init__(self, config: EngineConfig, server_config: ServerConfig, pace: float):
        super().__init__(config, server_config)
        self._pace = pace
        self._models = {"profiled": Profiled(), "oracle": Script()}

    @property
    def letters(self) -> list[int]:
        return [self.encode(script(position))[-1] for position in range(26)]

    async def take(self, rules: Rules) -> dict[str, Any]:
        """Begin anew by these rules; what there is to say of the run before."""
        done: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._commands.put(lambda: self._call(_settle, done, self._change(rules)))
        return await done

    def _serve(self, loaded: LoadedModel) -> None:
        engine = loaded.engine
        self._script = ScriptedRunner(engine.runner, self.letters, self._pace)
        engine.runner = self._script
        super()._serve(loaded)

    def _change(self, rules: Rules) -> dict[str, Any]:
        """On the engine's thread."""
        engine, runner = self._model.engine, self._model.runner
        old: Scheduler = engine.scheduler
        old.check_invariants()
        assert not old.running, "requests run"
        assert not old.waiting, "requests wait"
        engine.scheduler = rules.scheduler(
            runner.scheduler_config, runner.grid, runner.costs, self._models, old.stats
        )
        most, self._script.most_preemptions = self._script.most_preemptions, 0
        return {"most_preemptions": most}


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


async def serve(engine: EngineConfig, pace: float) -> None:
    with bind("127.0.0.1", 0) as sock:
        client = ScriptedEngine(engine, ServerConfig(), pace)
        url = address("127.0.0.1", sock.getsockname()[1])
        server = Server(
            client, sock, on_ready=lambda: _say({"url": url, "letters": client.letters})
        )
        server.handle_signals()
        client.start()
        listening = asyncio.create_task(_obey(client, server))
        try:
            await server.run()
        finally:
            listening.cancel()


async def _obey(client: ScriptedEngine, server: Server) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := await lines.readline():
        _say(await client.take(Rules(**json.loads(line))))
    server.stop()


def _say(table: dict[str, Any]) -> None:
    print(json.dumps(table), flush=True)


def command(engine: dict[str, Any], pace: float) -> list[str]:
    """How to start one with these settings."""
    return [sys.executable, __file__, json.dumps({"engine": engine, "pace": pace})]


def line(rules: Rules) -> bytes:
    return json.dumps(asdict(rules)).encode() + b"\n"


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    asyncio.run(serve(EngineConfig(**settings["engine"]), settings["pace"]))

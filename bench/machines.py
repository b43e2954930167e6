"""Where a load can run: a scripted server in its own process, or the simulator. Both start every
run with a new scheduler, which takes over what the one before has learnt of lengths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np

from bench.judge import COUNTERS, Run, Served
from bench.load import (
    Answer,
    Client,
    Gauges,
    Grouping,
    answers_of,
    read_metrics,
    send,
    wait_idle,
    watch,
)
from bench.rules import Rules
from bench.scripted import command, line
from scheduler.buckets import BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.lengths import Oracle, Profiled
from scheduler.simulator import Outcome, Simulator
from scheduler.steptime import StepTimeModel
from scheduler.workload import Trace

READY = 300.0  # seconds that loading and compiling may take
PATIENCE = 20.0  # seconds that a server may need to become idle when all clients have left


class Machine(Protocol):
    async def run(
        self, rules: Rules, trace: Trace, until: float, grouping: Grouping | None = None
    ) -> Run:
        """Put a load on a new scheduler. Requests that have not ended `until` (seconds) are left
        incomplete."""
        ...


# ---- the engine, over HTTP ----


class Engine:
    """A scripted server, to be had from `serving`."""

    def __init__(self, process: asyncio.subprocess.Process, client: Client):
        self._process = process
        self._client = client

    async def run(
        self, rules: Rules, trace: Trace, until: float, grouping: Grouping | None = None
    ) -> Run:
        await wait_idle(self._client, PATIENCE)
        await _ask(self._process, line(rules))
        answers = answers_of(trace)
        seen: list[Gauges] = [await read_metrics(self._client)]
        async with watch(self._client, seen):
            await send(self._client, answers, until, grouping)
        last = await wait_idle(self._client, PATIENCE)
        told = await _ask(self._process, line(rules))
        seen[0]["at"] = 0.0
        seen.append(last)
        return Run(
            served=Served.of_answers(answers),
            counters={
                name: sum(last[metric] - seen[0][metric] for metric in metrics)
                for name, metrics in COUNTERS.items()
            },
            series={
                "at": [gauges["at"] for gauges in seen],
                "running": [gauges["num_requests_running"] for gauges in seen],
                "waiting": [gauges["num_requests_waiting"] for gauges in seen],
                "held": [gauges["kv_pages{held}"] for gauges in seen],
                "cached": [gauges["kv_pages{cached}"] for gauges in seen],
                "reserved": [gauges["kv_pages_reserved"] for gauges in seen],
            },
            most_preemptions=told["most_preemptions"],
            last=last,
            answers=answers,
        )


@asynccontextmanager
async def serving(engine: dict[str, Any], pace: float = 0.0) -> AsyncIterator[Engine]:
    """A server with these settings of EngineConfig, on any free port, ended on leaving."""
    process = await asyncio.create_subprocess_exec(
        *command(engine, pace),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        ready = await _told(process, READY)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield Engine(process, Client(session, ready["url"], ready["letters"]))
        assert process.stdin is not None
        process.stdin.close()
        code = await asyncio.wait_for(process.wait(), READY)
        if code:
            raise ChildProcessError(f"the server ended with code {code}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ask(process: asyncio.subprocess.Process, message: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(message)
    return await _told(process, PATIENCE)


async def _told(process: asyncio.subprocess.Process, seconds: float) -> dict[str, Any]:
    assert process.stdout is not None
    said = await asyncio.wait_for(process.stdout.readline(), seconds)
    if not said:
        raise ChildProcessError(f"the server stopped with code {await process.wait()}")
    return json.loads(said)


# ---- the simulator ----


@dataclass(frozen=True, slots=True)
class Simulated:
    """An engine of these limits whose steps take these times."""

    limits: SchedulerConfig
    grid: BucketGrid
    times: StepTimeModel
    profiled: Profiled = field(default_factory=Profiled)

    @classmethod
    def like(cls, engine: dict[str, Any], times: Path) -> Simulated:
        """The engine with these settings of EngineConfig; host pages as many as the pool's, which
        is the engine's default as well."""
        from jaxserve.config import EngineConfig
        from jaxserve.runtime.runner import build_grid
        from jaxserve.simulate import scheduler_config

        model = StepTimeModel.load(times)
        settings = {"num_host_pages": engine["num_pages"]} | engine
        config = EngineConfig(**settings)
        limits = scheduler_config(config)
        return cls(limits, build_grid(config, limits, model.platform), model)

    async def run(
        self, rules: Rules, trace: Trace, until: float, grouping: Grouping | None = None
    ) -> Run:
        """Without a grouping nobody is cut off, which only makes the run longer."""
        if grouping is None:
            outcomes = [self._simulate(rules, trace)]
            served = Served.of_outcome(outcomes[0], trace, trace.arrival)
        else:
            outcomes, served = self._grouped(rules, trace, until, grouping)
        stats = [outcome.stats for outcome in outcomes]
        series = outcomes[0].series.samples
        return Run(
            served=served,
            counters={
                "recomputed": sum(s.preemptions["recompute"] for s in stats),
                "swapped": sum(s.preemptions["swap"] for s in stats),
                "tokens_again": sum(s.recomputed_tokens for s in stats),
                "tokens_computed": sum(s.plan_tokens["real"] for s in stats),
                "refused": sum(s.requests_refused.total() for s in stats),
            },
            series={
                "at": [sample.at for sample in series],
                "running": [sample.running for sample in series],
                "waiting": [sample.waiting for sample in series],
                "held": [sample.held for sample in series],
                "cached": [sample.cached for sample in series],
            },
            most_preemptions=max(int(o.preempted.max(initial=0)) for o in outcomes),
        )

    def _simulate(self, rules: Rules, trace: Trace) -> Outcome:
        lengths = {str(i): n for i, n in enumerate(trace.output_tokens.tolist())}
        models = {"profiled": self.profiled, "oracle": Oracle(lengths)}
        scheduler = rules.scheduler(self.limits, self.grid, self.times.costs, models)
        return Simulator(scheduler, trace, self.times).run()

    def _grouped(
        self, rules: Rules, trace: Trace, until: float, grouping: Grouping
    ) -> tuple[list[Outcome], Served]:
        """Group after group, each on an engine that is idle."""
        answers: Sequence[Answer] = answers_of(trace)
        outcomes: list[Outcome] = []
        parts: list[Served] = []
        now, first, last = 0.0, 0, 0  # see bench.load
        while first < len(answers) and now < until:
            while last < len(answers) and answers[last].due <= now:
                last += 1
            count = grouping.next(answers[first:last], now)
            if not count:
                due = answers[last].due if last < len(answers) else until
                now = min(due, grouping.wake(answers[first:last]))
                continue
            group = np.arange(first, first + count)
            part = Trace(
                arrival=np.full(count, now),
                prompt_tokens=trace.prompt_tokens[group],
                output_tokens=trace.output_tokens[group],
                max_tokens=trace.max_tokens[group],
            )
            outcome = self._simulate(rules, part)
            outcomes.append(outcome)
            parts.append(Served.of_outcome(outcome, part, trace.arrival[group]))
            now = outcome.end
            first += count
        return outcomes, Served.joined([*parts, Served.of_answers(answers[first:])])

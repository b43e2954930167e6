"""`jaxserve bench --fit`: measure a running engine's steps, and fit the simulator's StepTimeModel.

Steps of every PlanKey are made up, filled to several degrees and with several context lengths, and
submitted one behind another, as the engine does with lookahead: what counts is the time from the
end of one step to the end of the next. The order changes every round and medians are taken, so that
a machine whose speed drifts does so for all of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.loading import LoadedModel, load_model
from jaxserve.runtime.runner import DeviceRunner, Handle, StepResult
from jaxserve.terminal import progress
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.pages import pages_for
from scheduler.plan import PlanKey
from scheduler.request import Request, SamplingParams
from scheduler.request import Sequence as Row
from scheduler.slots import SlotTable
from scheduler.step import Step
from scheduler.steptime import (
    Fit,
    Load,
    Measurement,
    StepTimeModel,
    fit_kind,
    fit_sampler,
    load_of,
)

MIN_ROUNDS = 3
CONTEXTS = (64, 512, 2048)  # tokens, or as many as fit
HOST_STEPS = 50
TOKEN = 100  # an ordinary one: the first of a vocabulary are often control tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `bench` takes beyond the engine's settings."""
    parser.add_argument(
        "--fit", metavar="FILE", required=True, help="write the fitted step times here, as TOML"
    )
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="time to measure for (default: 75)"
    )


def main(args: argparse.Namespace, config: EngineConfig) -> int:
    """Load, measure, fit, write, and say how well the fit agrees with what was measured."""
    with progress() as report:
        loaded = load_model(config, report)
    try:
        model, comment = fit(loaded, config, args.seconds)
    finally:
        loaded.runner.close()
    Path(args.fit).write_text(model.to_toml(comment), encoding="utf-8")
    print(comment)
    print(f"\nwritten: {args.fit}")
    return 0


def fit(loaded: LoadedModel, config: EngineConfig, seconds: float) -> tuple[StepTimeModel, str]:
    """Measure for about so many seconds. Returns the model, and in words where it comes from and
    how far it is from the measurements."""
    runner = loaded.runner
    cases = make_cases(runner)
    measured = measure(runner, cases, seconds)
    plain = {kind: fit_kind(_of_kind(measured, kind)) for kind in ("decode", "mixed")}
    sampler = fit_sampler(_sampler_shares(measured))
    platform = jax.devices()[0].platform
    model = StepTimeModel(
        decode=plain["decode"].times,
        mixed=plain["mixed"].times,
        sampler=sampler.times,
        costs=runner.costs,
        host=measure_host(loaded),
        platform=platform,
        engine=_settings(config, runner.scheduler_config),
    )
    rounds = len(next(iter(measured.values())))
    lines = [
        f"{loaded.name}, {runner.dtype}, {platform}: {len(cases)} steps measured, "
        f"median of {rounds}",
        "error of the fit, relative to what was measured:",
        *(_errors(name, found) for name, found in (plain | {"sampler": sampler}).items()),
    ]
    return model, "\n".join(lines)


def _errors(name: str, found: Fit) -> str:
    if not len(found.errors):
        return f"  {name:<8} nothing was measured"
    size = np.abs(found.errors)
    middle, high, most = np.percentile(size, (50, 90, 100))
    return f"  {name:<8} median {middle:.1%}, p90 {high:.1%}, largest {most:.1%}"


def _settings(config: EngineConfig, limits: SchedulerConfig) -> dict[str, Any]:
    """What a scheduler like this one's is built from."""
    names = ("row_buckets", "token_buckets", "page_buckets", "lookahead")
    table = {field.name: getattr(limits, field.name) for field in fields(limits)}
    table |= {name: getattr(config, name) for name in names}
    return {name: value for name, value in table.items() if value is not None}


# ---- what is measured ----

Parts = tuple[tuple[int, int], ...]  # (tokens, context) of each row


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A made-up step. `twin`: the same without the sampler."""

    key: PlanKey
    step: Step
    load: Load
    twin: Case | None = None


def make_cases(runner: DeviceRunner) -> list[Case]:
    """Every PlanKey with several contexts and fill levels; and some with the sampler beside."""
    limits, grid = runner.scheduler_config, runner.grid
    wanted: dict[tuple[PlanKey, Parts], None] = {}  # in order, each once
    keys = grid.keys()
    for key in keys:
        longest = min(key.pages * limits.page_size, limits.max_tokens_per_sequence)
        for context in sorted({min(context, longest) for context in CONTEXTS}):
            compose = _decodes if key.kind == "decode" else _mixtures
            for parts in compose(key, runner, context, longest):
                wanted[key, parts] = None
    cases = [_case(runner, key, parts) for key, parts in wanted]
    rows = grid.decode_rows
    for count in sorted({rows[0], rows[len(rows) // 2], rows[-1]}):
        key, parts = grid.decode_key(count, 1), ((1, limits.page_size),) * count
        twin = _case(runner, key, parts)
        cases.append(twin)
        cases += [_case(runner, key, parts, drawn, twin) for drawn in sorted({1, count})]
    return cases


def _decodes(key: PlanKey, runner: DeviceRunner, context: int, longest: int) -> Iterator[Parts]:
    """All rows, of contexts from a quarter up; and just more rows than the next smaller bucket
    takes."""
    pool, sizes = runner.scheduler_config.pool_tokens, runner.grid.decode_rows
    most = min(context, pool // key.rows)
    yield tuple((1, max(1, round(c))) for c in np.linspace(most / 4, most, key.rows).tolist())
    few = 1 + max((size for size in sizes if size < key.rows), default=0)
    yield ((1, min(context, pool // few)),) * few


def _mixtures(key: PlanKey, runner: DeviceRunner, context: int, longest: int) -> Iterator[Parts]:
    """One chunk; a chunk beside single tokens; several fresh prompts."""
    limits = runner.scheduler_config
    if longest >= key.tokens:
        yield ((key.tokens, max(context, key.tokens)),)
    single = min(limits.max_rows - 1, key.tokens // 2)
    chunk = min(key.tokens - single, longest)
    if single and chunk > 1:
        each = max(1, min(context, limits.pool_tokens // (single + 1)))
        yield ((1, each),) * single + ((chunk, max(context, chunk)),)
    prompts = min(4, limits.max_rows)
    if 2 * prompts <= key.tokens:
        fresh = min(key.tokens // prompts, longest)
        yield ((fresh, fresh),) * prompts


def _case(
    runner: DeviceRunner,
    key: PlanKey,
    parts: Parts,
    drawn: int | None = None,
    twin: Case | None = None,
) -> Case:
    """A step of rows, of which `drawn` draw at random (None: the sampler does not run). Pages are
    taken in turn: what they hold does not matter."""
    limits = runner.scheduler_config
    table = SlotTable(limits.max_rows, limits.max_pages_per_sequence, limits.page_size)
    next_page = 0
    rows: list[tuple[Row, int]] = []
    for place, (length, context) in enumerate(parts):
        params = SamplingParams(temperature=float(place < (drawn or 0)), max_tokens=None)
        prompt = np.full(context, TOKEN, np.int32)
        row = Row(Request(str(place), prompt, params, 1, 0.0), prompt.tolist(), order=place)
        row.num_computed = context - length
        for _ in range(pages_for(context, limits.page_size)):
            row.pages.append(1 + next_page % limits.num_pages)
            next_page += 1
        table.enter(row)
        rows.append((row, length))
    single = np.array([row.slot for row, length in rows if length == 1], np.int32)
    plan = table.fill_plan(key, single, [(row, length) for row, length in rows if length > 1])
    use_sampler = drawn is not None
    return Case(key, Step(plan, (), use_sampler=use_sampler), load_of(plan, use_sampler), twin)


# ---- measuring ----


def measure(runner: DeviceRunner, cases: list[Case], seconds: float) -> dict[Case, list[float]]:
    """Rounds over all cases until the time is over: seconds of each, by case."""
    shuffle = random.Random(0)
    found: dict[Case, list[float]] = {case: [] for case in cases}
    _round(runner, cases)  # first touch of memory and threads
    began = time.perf_counter()
    rounds = 0
    while rounds < MIN_ROUNDS or time.perf_counter() - began < seconds:
        order = shuffle.sample(cases, len(cases))
        for case, spent in zip(order, _round(runner, order), strict=True):
            found[case].append(spent)
        rounds += 1
    return found


def _round(runner: DeviceRunner, cases: Sequence[Case]) -> list[float]:
    """Seconds from the end of the step before to the end of each step."""
    spent: list[float] = []
    in_flight = runner.submit(cases[-1].step)
    last: float | None = None
    for case in (*cases, None):
        following = runner.submit(case.step) if case is not None else None
        in_flight.result()
        now = time.perf_counter()
        if last is not None:
            spent.append(now - last)
        last = now
        if following is None:
            return spent
        in_flight = following
    raise AssertionError


def _of_kind(measured: dict[Case, list[float]], kind: str) -> list[Measurement]:
    return [
        Measurement(case.key, case.load, statistics.median(spent))
        for case, spent in measured.items()
        if case.key.kind == kind and not case.step.use_sampler
    ]


def _sampler_shares(measured: dict[Case, list[float]]) -> list[Measurement]:
    """What the sampler added."""
    shares: list[Measurement] = []
    for case, spent in measured.items():
        if case.twin is not None:
            with_it, without = statistics.median(spent), statistics.median(measured[case.twin])
            shares.append(Measurement(case.key, case.load, with_it - without, whole=with_it))
    return shares


# ---- the host ----


@dataclass(frozen=True, slots=True)
class _Instant:
    """A device that takes no time: what is left is the host's."""

    token: int

    def submit(self, step: Step) -> Handle:
        return _Known(np.full(step.plan.key.rows, self.token, np.int32))

    def reset(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Known:
    tokens: np.ndarray

    def result(self) -> StepResult:
        return StepResult(self.tokens)


def measure_host(loaded: LoadedModel) -> float:
    """Seconds that the host needs for an iteration: an engine without a device, half full, and the
    submission of a step to the idle device."""
    real, runner = loaded.engine, loaded.runner
    rows = max(1, runner.scheduler_config.max_rows // 2)
    engine = Engine(
        Scheduler(runner.scheduler_config, runner.grid),
        _Instant(TOKEN),
        loaded.tokenizer,
        vocab_size=real.vocab_size,
        eos_ids=real.eos_ids,
    )
    params = SamplingParams(temperature=0.0, max_tokens=2 * HOST_STEPS, ignore_eos=True)
    for number in range(rows):
        for request in engine.requests(f"host-{number}", [TOKEN] * 8, params, engine.clock()):
            engine.add(request)
    loop: list[float] = []
    for _ in range(HOST_STEPS):
        began = time.perf_counter()
        engine.step()
        loop.append(time.perf_counter() - began)
    key = runner.grid.decode_key(rows, 1)
    step = _case(runner, key, ((1, 16),) * rows).step
    submits: list[float] = []
    for _ in range(HOST_STEPS // 5):
        began = time.perf_counter()
        handle = runner.submit(step)
        submits.append(time.perf_counter() - began)
        handle.result()
    return statistics.median(loop) + statistics.median(submits)

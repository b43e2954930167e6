"""The collapse test's loads, and how they are put on a machine, real or simulated: unloaded,
saturated, through a burst, over a sweep beside other disciplines, and by each admission policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from bench.judge import Limits, Run, Window, percentile
from bench.load import Grouping
from bench.machines import Machine
from bench.rules import Rules
from scheduler.arrivals import gamma_arrivals
from scheduler.workload import Trace

CV = 2.0  # of the gaps between arrivals
DECK = 20  # requests; 5% and 15% of it are whole numbers
FEW, MANY = 0.05, 0.15  # of requests that run to the cap: before the burst, and from then on
PATIENCE = 60.0  # seconds after the last request in which all must have ended
GRACE = 2.0  # seconds, likewise for a first token that still counts
FOREVER = 600.0  # seconds, of what has an end by itself
WINDOW = 0.25  # seconds, of dynamic batching
ONE_BY_ONE = Grouping(rows=1, pages=1 << 30, page_size=1, window=0.0)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Tokens."""

    mean: float
    sigma: float  # of the logarithm
    low: int
    high: int

    def spread(self, count: int) -> np.ndarray:
        """int64[count]: its quantiles, which stand for it better than so few draws would."""
        normal = NormalDist(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        drawn = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine that is small enough to be overloaded, and what is asked of it. Lengths in tokens.
    cap: every request's max_tokens. pace: see bench/scripted.py."""

    model: str | None = None
    num_pages: int = 192
    page_size: int = 16
    rows: int = 20
    budget: int = 64
    context: int = 1024
    buckets: str = "pow2"
    pace: float = 0.0
    prompt: Lognormal = Lognormal(110, 0.6, 16, 400)
    output: Lognormal = Lognormal(50, 0.6, 8, 199)
    cap: int = 200
    long_prompt: int = 896
    streams: int = 12  # that decode beside long prompts,
    stream_tokens: int = 150  # so many each

    def engine(self, compile_cache: str | None) -> dict[str, Any]:
        """As settings of EngineConfig."""
        return {
            "model": self.model,
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "max_num_seqs": self.rows,
            "max_num_batched_tokens": self.budget,
            "max_model_len": self.context,
            "row_buckets": self.buckets,
            "token_buckets": self.buckets,
            "compile_cache": compile_cache,
        }

    def grouping(self, window: float = math.inf) -> Grouping:
        return Grouping(self.rows, self.num_pages, self.page_size, window)

    def deck(self, rng: np.random.Generator, to_cap: float) -> np.ndarray:
        """int64[DECK, 2]: prompt and output tokens. Every deck has the same lengths, in another
        order and other pairs, so that short loads differ little in their sums."""
        outputs = np.full(DECK, self.cap + 1)
        others = DECK - round(to_cap * DECK)
        outputs[:others] = self.output.spread(others)
        return np.stack([rng.permutation(self.prompt.spread(DECK)), rng.permutation(outputs)], 1)

    @property
    def tokens_per_request(self) -> float:
        """Output tokens, on average, when many run to the cap."""
        outputs = self.deck(np.random.default_rng(0), MANY)[:, 1]
        return float(np.minimum(outputs, self.cap).mean())


class Stage(NamedTuple):
    seconds: float
    factor: float  # of the saturated rate
    to_cap: float  # share of requests that run to the cap


class Point(NamedTuple):
    """`warm`: seconds at the beginning that do not count."""

    factor: float  # of the saturated rate
    seconds: float
    warm: float = 8.0

    @property
    def window(self) -> Window:
        return Window(self.warm, self.seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long all of it takes: in seconds, except where it says otherwise."""

    unloaded: int = 8  # requests
    saturated: float = 32.0
    stages: tuple[Stage, ...] = (Stage(20, 0.6, FEW), Stage(30, 2.5, MANY), Stage(25, 0.4, MANY))
    sweep: tuple[Point, ...] = (Point(0.5, 24), Point(1, 50), Point(2, 75), Point(3, 55))
    # without a limit on the queue, the first ones are served in time, and hold rows for long
    others: tuple[Point, ...] = (Point(0.5, 24), Point(1, 30), Point(2, 44, 20))
    policies: int = 50  # requests
    pressure: float = 2.0  # of these, in multiples of the saturated rate
    long_every: float = 2.0


SHORT = Plan(
    unloaded=4,
    saturated=10.0,
    stages=(Stage(5, 0.6, FEW), Stage(8, 2.5, MANY), Stage(6, 0.4, MANY)),
    sweep=(Point(2, 10, 2),),
    others=(Point(2, 6, 2),),
    policies=16,
    long_every=0.0,
)


# ---- loads ----


def stages_trace(setting: Setting, rate: float, stages: Sequence[Stage], seed: int) -> Trace:
    """Gamma arrivals in stages; `rate` a second at factor 1. Each stage has exactly as many as its
    rate says: bursts are within it."""
    rng = np.random.default_rng(seed)
    arrivals, lengths, begin = list[np.ndarray](), list[np.ndarray](), 0.0
    for stage in stages:
        count = max(1, round(rate * stage.factor * stage.seconds))
        ticks = gamma_arrivals(rng, 1.0, CV, count=count + 1)
        arrivals.append(begin + ticks[:-1] * stage.seconds / ticks[-1])
        decks = [setting.deck(rng, stage.to_cap) for _ in range(math.ceil(count / DECK))]
        lengths.append(np.concatenate(decks)[:count])
        begin += stage.seconds
    return _trace(np.concatenate(arrivals), np.concatenate(lengths), setting.cap)


def at_once(setting: Setting, count: int, to_cap: float, seed: int) -> Trace:
    return stages_trace(setting, count / 1e-3, [Stage(1e-3, 1.0, to_cap)], seed)


def streams_trace(setting: Setting, long_every: float, until: float) -> Trace:
    """Streams that begin together, and beside them long prompts at fixed intervals (0: none)."""
    long = np.arange(long_every, until, long_every) if long_every else np.zeros(0)
    streams = np.tile([setting.page_size, setting.stream_tokens], (setting.streams, 1))
    prompts = np.tile([setting.long_prompt, 2], (len(long), 1))
    arrival = np.concatenate([np.arange(setting.streams) * 1e-3, long])
    return _trace(arrival, np.concatenate([streams, prompts]), setting.stream_tokens)


def _trace(arrival: np.ndarray, lengths: np.ndarray, cap: int) -> Trace:
    return Trace(arrival, lengths[:, 0], lengths[:, 1], np.full(len(arrival), cap))


# ---- what is done with them ----

OWN, BESIDE = "jaxserve", "admit if fits"

# how others than the engine's own scheduler cope; nobody is refused
OTHERS: dict[str, tuple[Rules, float | None]] = {  # rules, window of the grouping if there is one
    BESIDE: (Rules("fits", host_pages=False), None),
    "static batches": (Rules("fits"), math.inf),
    "dynamic batches": (Rules("fits"), WINDOW),
}
POLICIES = {  # without host pages, so that what a preemption loses is seen
    BESIDE: Rules("fits", host_pages=False),
    "reserve max": Rules("reserve-max", host_pages=False),
    "profiled": Rules(host_pages=False),
    "oracle": Rules(lengths="oracle", host_pages=False),
}


@dataclass(frozen=True, slots=True)
class Interference:
    """Seconds."""

    alone: float  # 99th percentile of the gaps between tokens of streams
    beside: float  # the same while long prompts are computed
    chunk: float  # what a long prompt takes alone, for each of its steps

    @property
    def limit(self) -> float:
        return self.alone + 1.5 * self.chunk


Sweep = dict[str, dict[Point, Run]]  # by discipline


@dataclass(slots=True, eq=False)
class Measured:
    """All runs of one machine."""

    limits: Limits
    throughput: float  # output tokens a second when saturated
    rate: float  # requests a second, likewise
    rules: Rules  # of its own runs
    stages: dict[str, Run]  # by discipline: its own, and BESIDE
    sweep: Sweep
    policies: dict[str, Run]

    def own_runs(self) -> list[Run]:
        return [self.stages[OWN], *self.sweep[OWN].values()]


def door(setting: Setting, limits: Limits) -> Rules:
    """Refuse who would wait for long, beside the time to first token that is allowed: what follows
    the wait takes time as well, and the forecast is of an average."""
    allowed = float(limits.ttft(np.array([setting.prompt.mean]))[0])
    return Rules(max_queue_wait=0.3 * allowed, max_waiting=max(1, setting.rows // 4))


async def measure(machine: Machine, setting: Setting, plan: Plan, say: Say) -> Measured:
    """All but the interference. The order is that of need: limits, rate, then loads in multiples
    of it."""
    run = await machine.run(Rules(), at_once(setting, plan.unloaded, 0.0, 1), FOREVER, ONE_BY_ONE)
    limits = Limits.of_unloaded(run.served)
    say(f"unloaded: {limits}")

    flood = at_once(setting, 12 * setting.rows, FEW, 2)
    run = await machine.run(Rules(), flood, plan.saturated)
    end = min(plan.saturated, run.end)
    throughput = run.throughput(Window(end / 3, end))
    rate = throughput / setting.tokens_per_request
    say(f"saturated: {throughput:.1f} tokens/s, {rate:.2f} requests/s")

    rules = door(setting, limits)
    trace = stages_trace(setting, rate, plan.stages, 3)
    seconds = sum(stage.seconds for stage in plan.stages)
    stages = {
        OWN: await machine.run(rules, trace, seconds + PATIENCE),
        BESIDE: await machine.run(OTHERS[BESIDE][0], trace, seconds + GRACE),
    }
    for name, run in stages.items():
        good, served = int(limits.met(run.served).sum()), run.served
        say(f"stages, {name}: {good} of {len(served.due)} good, {served.refused.sum()} refused")

    sweep: Sweep = {OWN: {}}
    for number, point in enumerate(plan.sweep):
        trace = _sweep_trace(setting, rate, point, number)
        run = await machine.run(rules, trace, point.seconds + PATIENCE)
        sweep[OWN][point] = run
        say(f"{OWN}, {_told(run, limits, point)}")
    for name, (others, window) in OTHERS.items():
        sweep[name] = {}
        grouping = None if window is None else setting.grouping(window)
        for number, point in enumerate(plan.others):
            trace = _sweep_trace(setting, rate, point, number)
            run = await machine.run(others, trace, point.seconds + GRACE, grouping)
            sweep[name][point] = run
            say(f"{name}, {_told(run, limits, point)}")

    policies: dict[str, Run] = {}
    for name, each in POLICIES.items() if plan.policies else ():
        length = plan.policies / (plan.pressure * rate)
        trace = stages_trace(setting, rate, [Stage(length, plan.pressure, MANY)], 4)
        policies[name] = await machine.run(each, trace, FOREVER)
        say(f"{name}: {policies[name].served.made.sum() / policies[name].end:.1f} tokens/s")
    return Measured(limits, throughput, rate, rules, stages, sweep, policies)


def _sweep_trace(setting: Setting, rate: float, point: Point, seed: int) -> Trace:
    parts = (point.warm, point.seconds - point.warm)
    stages = [Stage(seconds, point.factor, MANY) for seconds in parts]
    return stages_trace(setting, rate, stages, 10 + seed)


def _told(run: Run, limits: Limits, point: Point) -> str:
    return (
        f"load {point.factor:g}: goodput {run.goodput(point.window, limits):.1f} of "
        f"{run.throughput(point.window):.1f} tokens/s, {run.served.refused.mean():.0%} refused"
    )


async def interfere(machine: Machine, setting: Setting, every: float, say: Say) -> Interference:
    """Streams alone, and beside a long prompt every so many seconds. Needs the times of tokens, so
    an engine."""
    long = _trace(np.zeros(2), np.tile([setting.long_prompt, 2], (2, 1)), setting.cap)
    run = await machine.run(Rules(), long, FOREVER, ONE_BY_ONE)
    alone = float(np.min(run.served.first - run.served.sent))
    chunk = alone / math.ceil(setting.long_prompt / setting.budget)
    gaps, until = list[float](), 0.0
    for each in (0.0, every):
        run = await machine.run(Rules(), streams_trace(setting, each, until), FOREVER)
        gaps.append(percentile(_gaps(run, setting.streams, each), 99))
        until = 1.5 * run.end
    found = Interference(gaps[0], gaps[1], chunk)
    say(f"long prompts: {found}, limit {found.limit:.3f}")
    return found


def _gaps(run: Run, streams: int, begin: float) -> np.ndarray:
    """float64[n] seconds between tokens while all streams run, from `begin` on."""
    times = [np.array(answer.times) for answer in run.answers[:streams]]
    begin = max(begin, *(each[0] for each in times))
    end = min(each[-1] for each in times)
    return np.concatenate([np.diff(each[(each >= begin) & (each <= end)]) for each in times])

"""What a simulation has shown: goodput, percentiles, pool and queue over time. Reads outcomes; runs
nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scheduler.stats import Stats

if TYPE_CHECKING:
    from scheduler.simulator import Outcome

MAX_ENGINES = 1024  # where the search for a count ends
SERIES_POINTS = 500  # of a report


class Percentiles(NamedTuple):
    """Seconds; NaN where there was nothing to measure."""

    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: np.ndarray) -> Percentiles:
        if not len(values):
            return cls(*[math.nan] * 4)
        return cls(*np.percentile(values, (50, 90, 99, 100)).tolist())


class GapHistogram:
    """Any number of gaps in bounded memory: 200 bins a decade from 1 us on, each 1.2 % wide."""

    PER_DECADE = 200
    LOW = 1e-6  # seconds
    DECADES = 11

    def __init__(self) -> None:
        self.counts = np.zeros(self.PER_DECADE * self.DECADES, np.int64)
        self.most = 0.0

    def add(self, gaps: np.ndarray) -> None:
        """float64[n] seconds."""
        if not len(gaps):
            return
        self.most = max(self.most, float(gaps.max()))
        bins = np.log10(np.maximum(gaps, self.LOW) / self.LOW) * self.PER_DECADE
        np.add.at(self.counts, np.minimum(bins.astype(np.int64), len(self.counts) - 1), 1)

    def merge(self, other: GapHistogram) -> None:
        self.counts += other.counts
        self.most = max(self.most, other.most)

    def percentiles(self) -> Percentiles:
        total = int(self.counts.sum())
        if not total:
            return Percentiles.of(np.zeros(0))
        reached = np.cumsum(self.counts)

        def at(share: float) -> float:
            place = int(np.searchsorted(reached, share * total))
            return min(self.LOW * 10 ** ((place + 0.5) / self.PER_DECADE), self.most)

        return Percentiles(at(0.5), at(0.9), at(0.99), self.most)


class Sample(NamedTuple):
    """The gauges at a time. Pages, and sequences."""

    at: float  # seconds
    held: int
    cached: int
    waiting: int
    running: int


class PoolSeries:
    """Samples at least `every` seconds apart; when there are too many, every second one is dropped
    and the distance doubled."""

    MOST = 4096

    def __init__(self, every: float) -> None:
        self.samples: list[Sample] = []
        self._every = every
        self._next = -math.inf

    def sample(self, now: float, stats: Stats, *, last: bool = False) -> None:
        if now < self._next and not last:
            return
        self._next = now + self._every
        self.samples.append(
            Sample(now, stats.pages_held, stats.pages_cached, stats.num_waiting, stats.num_running)
        )
        if len(self.samples) > self.MOST:
            del self.samples[1::2]
            self._every *= 2

    def at(self, times: np.ndarray) -> np.ndarray:
        """float64[times, 4]: the last sample's gauges at each time."""
        table = np.array(self.samples, float).reshape(-1, len(Sample._fields))
        places = np.searchsorted(table[:, 0], times, side="right") - 1
        return np.where((places >= 0)[:, None], table[np.maximum(places, 0), 1:], 0.0)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must get to count: its first token within `ttft` seconds, or within
    ttft_factor times what it takes on an idle engine if that is more; and on average at most
    `per_token` seconds for each further token."""

    ttft: float = 1.0
    per_token: float = 0.05
    ttft_factor: float = 0.0

    def met(self, outcome: Outcome) -> np.ndarray:
        """bool[n]: complete, and within both."""
        limit = np.maximum(self.ttft, self.ttft_factor * outcome.unloaded)
        first = outcome.first_at - outcome.arrival
        rest = (outcome.last_at - outcome.first_at) / np.maximum(outcome.made - 1, 1)
        # a hundredth of a microsecond: sums of step times are not exact
        return outcome.complete & (first <= limit + 1e-8) & (rest <= self.per_token + 1e-8)


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one load on `engines` engines. Rates are output tokens a second over `seconds`,
    from the first arrival to the end of the last step."""

    slo: Slo
    engines: int
    requests: int
    endings: dict[str, int]  # see simulator.ENDINGS
    seconds: float
    steps: int
    prompt_tokens: int  # of requests that were let in
    output_tokens: int
    throughput: float
    goodput: float  # of requests that met the SLO
    attainment: float  # share of all requests that met it; those refused did not
    ttft: Percentiles
    inter_token: Percentiles
    preemptions: dict[str, int]  # by mode
    most_preemptions: int  # of one request
    recomputed_share: float  # of all tokens computed
    prefix_hit_share: float  # of prompt tokens looked up
    pages_copied: dict[str, int]
    num_pages: int  # of all engines
    series: list[Sample] = field(repr=False)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], slo: Slo) -> Report:
        """Of one or several engines that shared a load."""
        stats = [outcome.stats for outcome in outcomes]
        met = [slo.met(outcome) for outcome in outcomes]
        began = min(float(o.arrival[0]) for o in outcomes if len(o.arrival))
        ended = max(outcome.end for outcome in outcomes)
        seconds = max(ended - began, 1e-9)
        requests = sum(len(outcome.arrival) for outcome in outcomes)
        output_tokens = sum(int(outcome.made.sum()) for outcome in outcomes)
        good = sum(int(o.made[m].sum()) for o, m in zip(outcomes, met, strict=True))
        gaps = GapHistogram()
        endings: Counter[str] = Counter()
        preemptions: Counter[str] = Counter()
        copied: Counter[str] = Counter()
        for outcome in outcomes:
            gaps.merge(outcome.gaps)
            endings.update(outcome.endings())
            preemptions.update(outcome.stats.preemptions)
            copied.update(outcome.stats.pages_copied)
        waits = np.concatenate([o.first_at - o.arrival for o in outcomes])
        queried = sum(s.prefix_tokens["queried"] for s in stats)
        hit = sum(s.prefix_tokens["hit"] + s.prefix_tokens["hit_host"] for s in stats)
        return cls(
            slo=slo,
            engines=len(outcomes),
            requests=requests,
            endings=dict(endings),
            seconds=seconds,
            steps=sum(s.steps for s in stats),
            prompt_tokens=sum(s.prompt_tokens for s in stats),
            output_tokens=output_tokens,
            throughput=output_tokens / seconds,
            goodput=good / seconds,
            attainment=sum(int(m.sum()) for m in met) / requests,
            ttft=Percentiles.of(waits[~np.isnan(waits)]),
            inter_token=gaps.percentiles(),
            preemptions=dict(preemptions),
            most_preemptions=max(int(o.preempted.max(initial=0)) for o in outcomes),
            recomputed_share=_share(
                sum(s.recomputed_tokens for s in stats), sum(s.plan_tokens["real"] for s in stats)
            ),
            prefix_hit_share=_share(hit, queried),
            pages_copied=dict(copied),
            num_pages=sum(outcome.num_pages for outcome in outcomes),
            series=_together([outcome.series for outcome in outcomes], began, ended),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what was not measured is None."""
        table = asdict(self)
        for name in ("ttft", "inter_token"):
            seconds = getattr(self, name)._asdict()
            table[name] = {k: None if math.isnan(v) else v for k, v in seconds.items()}
        table["series"] = {
            name: [sample[place] for sample in self.series]
            for place, name in enumerate(Sample._fields)
        }
        return table


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _together(series: Sequence[PoolSeries], began: float, ended: float) -> list[Sample]:
    """The sum over engines, at common times."""
    if len(series) == 1:
        return series[0].samples
    times = np.linspace(began, ended, SERIES_POINTS)
    total = sum((one.at(times) for one in series), np.zeros((len(times), 4)))
    counts = total.astype(int).tolist()
    return [Sample(at, *row) for at, row in zip(times.tolist(), counts, strict=True)]


def engines_needed(
    run: Callable[[int], Report], target: float, most: int = MAX_ENGINES
) -> tuple[int | None, dict[int, Report]]:
    """The smallest number of engines whose report reaches the target share of requests within the
    SLO, and the reports of all counts that were tried; None if `most` do not reach it.

    More engines are taken never to be worse.
    """
    reports: dict[int, Report] = {}

    def reached(count: int) -> bool:
        reports[count] = run(count)
        return reports[count].attainment >= target

    low, high = 0, 1  # low does not reach it
    while not reached(high):
        if high >= most:
            return None, reports
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high, reports

"""Admission: may this request start? A row only ever grows, so the pool that it fits into now may
be outgrown later, and then somebody is preempted. A policy says how much of that it risks.

Knows counts of pages and tokens, and a LengthModel; nothing of queues or of which page is whose.
The caller checks that pages for the present tokens are really there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np

from scheduler.lengths import LengthModel, Rows


class RunningSet(NamedTuple):
    """The rows that run. A row's own pages are those of its tokens less the shared ones."""

    rows: Rows
    tokens: np.ndarray  # int64[n] prompt and output so far: all of them need pages
    shared: np.ndarray  # int64[n] pages that were prefix hits at the start: the base counts them


class Candidate(NamedTuple):
    """One sequence that could start; the fields are those of a RunningSet's rows."""

    profile: int
    age: int
    limit: int
    tokens: int
    shared: int


class AdmissionRound(Protocol):
    """One step's decisions. The rows that it has admitted count from then on."""

    def admits(self, candidate: Candidate) -> bool:
        """May it start beside those that run? True also adds it to them. The first row always
        may: one that runs alone can hurt nobody."""
        ...

    @property
    def reserved(self) -> int:
        """Pages set aside beyond what the rows need right now."""
        ...


class AdmissionPolicy(Protocol):
    def round(
        self, running: RunningSet, base_pages: int, capacity: int, page_size: int
    ) -> AdmissionRound:
        """base_pages: held pages that are no row's own. capacity: usable pages of the pool."""
        ...


# ---- counting what each row needs at some fixed length ----


def _as_rows(row: Candidate) -> RunningSet:
    profile, age, limit, tokens, shared = np.array([row], np.int64).T
    return RunningSet(Rows(profile, age, limit), tokens, shared)


def _pages(running: RunningSet, more: np.ndarray | int, page_size: int) -> int:
    """What these rows need of their own when each has made `more` tokens."""
    return int((-(-(running.tokens + more) // page_size) - running.shared).sum())


def _next(rows: Rows) -> int:
    return 1


def _rest(rows: Rows) -> np.ndarray:
    return rows.limit - rows.age


class _CountedRound:
    """Every row counts with the pages of its tokens and `more`; all must fit together."""

    def __init__(
        self,
        more: Callable[[Rows], np.ndarray | int],
        running: RunningSet,
        base_pages: int,
        capacity: int,
        page_size: int,
    ):
        self._more = more
        self._room = capacity - base_pages
        self._page_size = page_size
        self._rows = len(running.tokens)
        self._present = _pages(running, 0, page_size)
        self._counted = _pages(running, more(running.rows), page_size)

    def admits(self, candidate: Candidate) -> bool:
        row = _as_rows(candidate)
        counted = self._counted + _pages(row, self._more(row.rows), self._page_size)
        if self._rows and counted > self._room:
            return False
        self._rows += 1
        self._present += _pages(row, 0, self._page_size)
        self._counted = counted
        return True

    @property
    def reserved(self) -> int:
        return self._counted - self._present


class AdmitIfFits:
    """The present tokens and the next one fit. Everything that follows is left to preemption."""

    def round(
        self, running: RunningSet, base_pages: int, capacity: int, page_size: int
    ) -> AdmissionRound:
        return _CountedRound(_next, running, base_pages, capacity, page_size)


class ReserveMax:
    """Every row fits at its limit: no row is ever preempted for want of pages, and most of the
    pool waits for tokens that never come."""

    def round(
        self, running: RunningSet, base_pages: int, capacity: int, page_size: int
    ) -> AdmissionRound:
        return _CountedRound(_rest, running, base_pages, capacity, page_size)


# ---- statistical multiplexing ----

_INTERVALS = 32
_FIRST = 4  # tokens; shorter intervals would all be within a page
# The rows can outgrow the pool in any of the intervals, though mostly in several at once: the
# chance of it was measured at 1 to 2.5 times that of the worst interval alone.
_SPREAD = 3


@lru_cache(maxsize=64)
def _intervals(reach: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[t], int32[t]: first and last step of intervals that cover the steps 0 to reach - 1.
    Their lengths grow with the distance."""
    steps = np.geomspace(min(_FIRST, reach), reach, _INTERVALS).astype(np.int32)
    steps = np.unique(np.concatenate([np.arange(2, dtype=np.int32), steps]))
    return steps[:-1], steps[1:] - 1


@dataclass(frozen=True, slots=True)
class Statistical:
    """Admits while the chance that the rows outgrow the pool stays under `bound`, by the word of
    the length model: statistical multiplexing, page rounding included, over the distributions of
    all rows' remaining lengths. `buffer`: share of the pool that stays out of the sum, for what the
    model can't know (its own error; pages that come free a step late).

    The steps ahead are cut into 32 intervals. In each a row counts with the pages that it would
    have at the interval's end if it lives to see its beginning, independently of the others: no
    step is left out. Mean, variance and third cumulant of the sum are exact. Its quantile is that
    of the shifted gamma distribution with these three (as for the total claims of a portfolio; the
    quantile after Wilson and Hilferty 1931), but at least what the largest row needs that is
    likelier than the bound, with the mean of the others, and at most what all rows need.

    Sets of 1 to 256 rows whose lengths are drawn from the model itself outgrow the pages that this
    asks for less often than `bound`. It asks for more than the least number of which that is true:
    by 1% for 64 rows of mixed ages, 2 to 10% for 4, half for one row with a heavy tail; and by 15%
    where many rows start at once and nearly all live to much the same age.
    """

    lengths: LengthModel
    bound: float = 0.01
    buffer: float = 0.02

    def __post_init__(self) -> None:
        assert 0 < self.bound < 1
        assert 0 <= self.buffer < 1

    def round(
        self, running: RunningSet, base_pages: int, capacity: int, page_size: int
    ) -> AdmissionRound:
        return _StatisticalRound(self, running, base_pages, capacity, page_size)


class _Demand(NamedTuple):
    """What some rows need in each interval, in pages. The demand of two sets of rows is the sum of
    theirs, but for `largest`."""

    mean: np.ndarray  # float64[t]
    variance: np.ndarray  # float64[t]
    third: np.ndarray  # float64[t] third cumulant
    most: np.ndarray  # float64[t] if all rows live that can
    largest: np.ndarray  # float64[t] what a row adds to the mean if it lives, and it well may

    def plus(self, other: _Demand) -> _Demand:
        return _Demand(
            self.mean + other.mean,
            self.variance + other.variance,
            self.third + other.third,
            self.most + other.most,
            np.maximum(self.largest, other.largest),
        )

    def quantile(self, normal: float) -> int:
        """Pages that are enough in every interval; `normal`: the standard normal's quantile."""
        deviation = np.sqrt(np.maximum(self.variance, 1e-12))
        skewness = np.maximum(self.third / deviation**3, 1e-3)
        root = 2 / skewness  # of the gamma distribution's shape
        gamma = root * np.maximum(1 - 1 / (3 * root) ** 2 + normal / (3 * root), 0) ** 3
        pages = np.maximum(self.mean + deviation * (gamma - root), self.mean + self.largest)
        return ceil(np.minimum(pages, self.most).max() - 1e-6)


class _StatisticalRound:
    def __init__(
        self,
        policy: Statistical,
        running: RunningSet,
        base_pages: int,
        capacity: int,
        page_size: int,
    ):
        self._lengths = policy.lengths
        self._risk = policy.bound / _SPREAD
        self._normal = NormalDist().inv_cdf(1 - self._risk)
        self._room = capacity - base_pages
        self._buffer = ceil(capacity * policy.buffer)
        self._page_size = page_size
        self._rows = running
        self._present = _pages(running, 0, page_size)
        self._maximum = _pages(running, _rest(running.rows), page_size)
        self._reach = 0
        self._demand: _Demand | None = None  # of self._rows within self._reach; None: not known

    def admits(self, candidate: Candidate) -> bool:
        row = _as_rows(candidate)
        present = self._present + _pages(row, 0, self._page_size)
        maximum = self._maximum + _pages(row, _rest(row.rows), self._page_size)
        demand = None
        if len(self._rows.tokens) and maximum > self._room:
            room = self._room - self._buffer
            if present > room:
                return False
            demand = self._known(candidate.limit - candidate.age).plus(self._demand_of(row))
            if demand.quantile(self._normal) > room:
                return False
        rows = (np.concatenate(pair) for pair in zip(self._rows.rows, row.rows, strict=True))
        self._rows = RunningSet(
            Rows(*rows),
            np.concatenate([self._rows.tokens, row.tokens]),
            np.concatenate([self._rows.shared, row.shared]),
        )
        self._present, self._maximum, self._demand = present, maximum, demand
        return True

    @property
    def reserved(self) -> int:
        if not len(self._rows.tokens):
            return 0
        return max(self._known(0).quantile(self._normal) - self._present, 0)

    def _known(self, reach: int) -> _Demand:
        """The demand of the rows so far, over at least `reach` steps."""
        if self._demand is None:
            reach = max(reach, int(_rest(self._rows.rows).max()))
        if self._demand is None or reach > self._reach:
            self._reach = 1 << max(reach - 1, 1).bit_length()  # few values, kept in a cache
            self._demand = self._demand_of(self._rows)
        return self._demand

    def _demand_of(self, running: RunningSet) -> _Demand:
        first, last = _intervals(self._reach)
        alive = self._lengths.survival(running.rows, first).T  # float64[t, n]
        # shared pages as tokens that need none; int32, which divides five times as fast
        size = self._page_size
        tokens = (running.tokens - running.shared * size + (size - 1)).astype(np.int32)
        growth = np.minimum(last[:, None], _rest(running.rows).astype(np.int32))
        pages = ((growth + tokens) // size).astype(np.float64)
        mean = alive * pages
        rest = pages - mean
        variance = mean * rest
        return _Demand(
            mean.sum(1),
            variance.sum(1),
            (variance * (rest - mean)).sum(1),
            pages.sum(1, where=alive > 0),
            rest.max(1, where=alive > self._risk, initial=0),
        )


# of a length model and a bound on the probability that the running set outgrows the pool
ADMISSION: dict[str, Callable[[LengthModel, float], AdmissionPolicy]] = {
    "fits": lambda lengths, bound: AdmitIfFits(),
    "reserve-max": lambda lengths, bound: ReserveMax(),
    "statistical": Statistical,
}

"""LengthModel: how many more tokens will a request make, given those that it has made?

Everything is said as survival: S(t) = P(length > t), where a length is a number of output tokens.
`Profiled` learns it from the requests that have finished, in tables that a query only looks up.
Knows requests and token counts; nothing of pages, rows on a device, or time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from scheduler.request import Request

# ---- what others ask of a length model ----


class Rows(NamedTuple):
    """Sequences, as a length model sees them."""

    profile: np.ndarray  # int64[n] what LengthModel.profile gave
    age: np.ndarray  # int64[n] output tokens made so far
    limit: np.ndarray  # int64[n] max_tokens


class LengthModel(Protocol):
    """The distribution of a request's output length. Nothing here changes a request's tokens."""

    def profile(self, request: Request) -> int:
        """An opaque number that the caller keeps with the request; valid as long as the model."""
        ...

    def survival(self, rows: Rows, horizons: np.ndarray) -> np.ndarray:
        """float64[n, t]: P(length > age + h | length > age) for horizons int64[t] in tokens; 0
        where age + h reaches the limit, never 0 before it unless the length is known."""
        ...

    def expected(self, profile: int, age: int, limit: int) -> float:
        """Mean tokens still to come, at most limit - age."""
        ...

    def observe(self, request: Request, profile: int, num_output: int, censored: bool) -> None:
        """A request has ended after num_output tokens. censored: it would have made more (it ran
        into its limit, its deadline, or was aborted)."""
        ...

    def watch(self, rows: Rows) -> None:
        """The rows that run, once a step. The arrays are kept until the next call."""
        ...


class Declared:
    """Every request makes max_tokens. The safe assumption, and a wasteful one."""

    def profile(self, request: Request) -> int:
        return 0

    def survival(self, rows: Rows, horizons: np.ndarray) -> np.ndarray:
        return (rows.age[:, None] + horizons < rows.limit[:, None]).astype(np.float64)

    def expected(self, profile: int, age: int, limit: int) -> float:
        return float(max(limit - age, 0))

    def observe(self, request: Request, profile: int, num_output: int, censored: bool) -> None:
        pass

    def watch(self, rows: Rows) -> None:
        pass


class Oracle:
    """Knows each length beforehand, by request id: for tests and simulation. The profile is the
    length itself."""

    def __init__(self, lengths: Mapping[str, int]):
        self._lengths = lengths

    def profile(self, request: Request) -> int:
        return self._lengths[request.request_id]

    def survival(self, rows: Rows, horizons: np.ndarray) -> np.ndarray:
        length = np.minimum(rows.profile, rows.limit)
        return (rows.age[:, None] + horizons < length[:, None]).astype(np.float64)

    def expected(self, profile: int, age: int, limit: int) -> float:
        return float(max(min(profile, limit) - age, 0))

    def observe(self, request: Request, profile: int, num_output: int, censored: bool) -> None:
        pass

    def watch(self, rows: Rows) -> None:
        pass


# ---- the token axis of a table ----

# Cells are one token wide up to 128 tokens, two up to 384, and so on: never wider than 1/128 of
# the way. A cell's number is then the exponent and the top 7 bits of float32(tokens + 128), which
# is exact, and far cheaper than a search.
_FIRST = 128
_MOST = 2**20  # tokens; an age or a horizon that is longer counts as this long
_SHIFT = 23 - 7
_ORIGIN = (127 + 7) << 7
_CELLS = (22 - 7) << 7  # up to 2**22 - 128 tokens: age + horizon always has a cell
_START = np.array([((_FIRST + c % _FIRST) << (c // _FIRST)) - _FIRST for c in range(_CELLS)])
_WIDTH = np.diff(_START, append=_START[-1] + 1)

# Before any data: half of the requests make more than 256 tokens, and of those that have made t,
# half make t + 256 more. This spreads them over all scales, with a tail heavier than those of
# public traces, whose medians lie between 13 and 1601 (208 by geometric mean).
_PRIOR = 1 / (1 + _START / 256)  # float64[cells]


def cell_of(tokens: np.ndarray) -> np.ndarray:
    """int32: the cell that holds each of these numbers of tokens."""
    shifted = np.minimum(tokens, _MOST).astype(np.float32) + np.float32(_FIRST)
    return (shifted.view(np.int32) >> _SHIFT) - _ORIGIN


class Sample(NamedTuple):
    """Requests as they were seen: from `entry` tokens on, up to `length`."""

    entry: np.ndarray  # int64[n] below length
    length: np.ndarray  # int64[n] at least 1
    ended: np.ndarray  # bool[n] it is that long; else longer (censored)
    running: np.ndarray  # bool[n] not finished


def product_limit(sample: Sample, prior: np.ndarray = _PRIOR, weight: float = 0.0) -> np.ndarray:
    """float64[cells]: S at each cell's first token.

    The product-limit estimate (Kaplan and Meier 1958; late entry as in Lynden-Bell 1971) over the
    sample and `weight` pseudo-requests that are spread as `prior`, an S of the same form. This is
    the Bayes estimate under a Dirichlet process prior (Susarla and Van Ryzin 1976): the prior where
    there are no data, the data where there are many, and beyond the longest observation the prior's
    hazard, so that S is never 0. With weight 0 it is Kaplan and Meier's own.

    Late entry makes the numbers at risk small and noisy at high ages. So they are at least those
    of the finished requests alone, counted from their first token: unbiased under a steady load.
    """
    entry, length, ended, running = sample
    # the first cell that starts at or after it, so that S is never too small
    leave = cell_of(length - 1) + 1
    events = np.bincount(leave[ended], minlength=_CELLS)
    finished = leave[~running]
    at_risk = np.maximum(
        _at_risk(cell_of(entry) + 1, leave), _at_risk(np.ones_like(finished), finished)
    )
    before, after = at_risk.astype(np.float64), at_risk - events + weight * prior
    before[1:] += weight * prior[:-1]
    before[0] = after[0] = 1.0
    return np.cumprod(np.divide(after, before, out=np.ones(_CELLS), where=before > 0))


def _at_risk(enter: np.ndarray, leave: np.ndarray) -> np.ndarray:
    """int64[cells]: how many are there, from their cell `enter` to their cell `leave` inclusive."""
    change = np.bincount(enter, minlength=_CELLS)
    change[1:] -= np.bincount(leave, minlength=_CELLS)[:-1]
    return change.cumsum()


# ---- learning from what has finished ----

_CLASSES = 64  # of prompt lengths, four to the octave
_BINS = 3
_MIN_EVENTS = 32  # of each bin
_SIGNIFICANT = 13.8  # chi-square of two degrees of freedom at 0.1%

_FRACTION = 16  # a table is computed again after so large a part of its window is new
_PERIOD = 16  # steps after which it is, for the rows that run, if there are few tables
_PAUSE = 4  # steps between two such computations


def _prompt_class(request: Request) -> int:
    value = np.float32(len(request.prompt)).view(np.int32)
    return min((int(value) >> 21) - (127 << 2), _CLASSES - 1)


class _Window:
    """The last requests that finished, in a ring."""

    def __init__(self, size: int):
        self.count = 0  # ever
        self.stale = 0  # observations since the last estimate
        self._length = np.zeros(size, np.int64)
        self._ended = np.zeros(size, np.bool_)
        self._kind = np.zeros(size, np.int64)  # class of the prompt's length
        self._clock = np.zeros(size, np.int64)  # step at which it finished

    def add(self, length: int, ended: bool, kind: int, clock: int) -> None:
        at = self.count % len(self._length)
        self._length[at], self._ended[at] = length, ended
        self._kind[at], self._clock[at] = kind, clock
        self.count += 1
        self.stale += 1

    def sample(self, ages: np.ndarray, kinds: np.ndarray, clock: int) -> tuple[Sample, np.ndarray]:
        """What was seen since the oldest request in the ring finished, with the rows that run as
        censored ones; and int64[n] the classes of all.

        The finished alone miss the long ones for as long as a burst lasts; with the running rows
        added from their first token on, those are counted too often for ever. Right is what each
        row did since that moment, and that is known: it makes at most one token a step.
        """
        size = min(self.count, len(self._length))
        length = np.concatenate([self._length[:size], ages])
        since = np.concatenate([self._clock[:size], np.full(len(ages), clock)])
        ended = np.concatenate([self._ended[:size], np.zeros(len(ages), np.bool_)])
        kind = np.concatenate([self._kind[:size], kinds])
        entry = np.zeros_like(length)
        if clock and self.count > size:
            since -= self._clock[self.count % size]
            entry = np.clip(length - since, 0, length - 1)
        running = np.arange(len(length)) >= size
        return Sample(entry, length, ended, running), kind


class Profiled:
    """Learns from the requests that finish: Kaplan-Meier over a sliding window per key, which is
    the request's `profile`, or its tenant where that is empty.

    A key's estimate is split by prompt length (in three, at the terciles of its window) while each
    part has seen 32 requests end and a log-rank test says that the parts differ (Peto and Peto
    1972, their conservative form, at 0.1%). Every estimate has a prior: at first the next wider one
    (of part, key, all), counted as two requests, so that a new key starts with what all do; and as
    its own window fills, the curve that was there before any data, counted as one. That one speaks
    for what is longer than anything seen: a next request is, once in as many as were seen.

    `window` requests per key are kept, and `max_keys` keys: the one that was used longest ago makes
    room, and its requests are predicted as all are. A query only looks up tables (4 MB of them);
    they are computed when something was observed, and now and then for the rows that run.
    """

    def __init__(self, window: int = 384, max_keys: int = 64):
        assert window > 0
        assert max_keys > 0
        self._windows = [_Window(window) for _ in range(1 + max_keys)]  # the first one: all
        # float64[windows * (1 + bins), cells]; a window's own estimate, then those of its parts
        self._tables = np.tile(_PRIOR, (len(self._windows) * (1 + _BINS), 1))
        self._table_of = np.zeros((len(self._windows), _CLASSES), np.int64)
        # who has which window: a window's next owner has another identity, equal modulo windows
        self._identity = np.arange(len(self._windows))
        self._owned: dict[str, int] = {}  # key -> window, longest unused first
        self._due: set[int] = set()  # windows whose tables are to be computed again
        self._clock = 0  # steps
        self._window_size = window
        none = np.zeros(0, np.int64)
        self._rows = Rows(none, none, none)

    def profile(self, request: Request) -> int:
        window = self._own(request.options.profile or request.options.tenant)
        return int(self._identity[window]) * _CLASSES + _prompt_class(request)

    def survival(self, rows: Rows, horizons: np.ndarray) -> np.ndarray:
        # cell_of, spelled out for [t, n], where the long axis is the inner one
        base = self._tables_of(rows.profile) * _CELLS - _ORIGIN
        now = np.minimum(rows.age, _MOST).astype(np.float32) + np.float32(_FIRST)
        then = now + np.minimum(horizons, _MOST).astype(np.float32)[:, None]
        flat = self._tables.reshape(-1)
        survival = flat.take((then.view(np.int32) >> _SHIFT) + base)
        unfinished = then < (rows.limit + _FIRST).astype(np.float32)
        survival /= flat.take((now.view(np.int32) >> _SHIFT) + base)
        survival *= unfinished
        return survival.T

    def expected(self, profile: int, age: int, limit: int) -> float:
        limit = min(limit, _MOST)
        if age >= limit:
            return 0.0
        table = self._tables[self._tables_of(np.array([profile]))[0]]
        first, last = cell_of(np.array([age, limit - 1])).tolist()
        width = _WIDTH[first : last + 1].copy()
        width[0] -= age - _START[first]
        width[-1] -= _START[last] + _WIDTH[last] - limit
        return float(table[first : last + 1] @ width / table[first])

    def observe(self, request: Request, profile: int, num_output: int, censored: bool) -> None:
        if num_output <= 0:
            return
        own = self._own(request.options.profile or request.options.tenant)
        for window in (0, own):
            kept = self._windows[window]
            kept.add(num_output, not censored, profile % _CLASSES, self._clock)
            if kept.stale > min(kept.count, self._window_size) // _FRACTION:
                self._due.add(window)
        # the rows that run were seen before these tokens came: they fit together at the next watch
        if not self._clock:
            self._estimate_due()

    def watch(self, rows: Rows) -> None:
        self._rows = rows
        self._clock += 1
        windows = 1 + len(self._owned)
        turn, rest = divmod(self._clock, max(_PERIOD // windows, _PAUSE))
        if not rest:
            self._due.add(turn % windows)
        self._estimate_due()

    def _own(self, key: str) -> int:
        """The key's window; a new key takes the one that was used longest ago."""
        window = self._owned.pop(key, None)
        if window is None:
            window = 1 + len(self._owned)
            if window == len(self._windows):
                window = self._owned.pop(next(iter(self._owned)))
            self._identity[window] += len(self._windows)
            self._windows[window] = _Window(self._window_size)
            self._table_of[window] = 0
        self._owned[key] = window
        return window

    def _tables_of(self, profiles: np.ndarray) -> np.ndarray:
        """int64[n]: the table that predicts for each."""
        identity, kind = np.divmod(profiles, _CLASSES)
        window = identity % len(self._windows)
        return np.where(self._identity[window] == identity, self._table_of[window, kind], 0)

    def _estimate_due(self) -> None:
        for window in sorted(self._due):  # the first one is the prior of the others
            self._estimate(window)
        self._due.clear()

    def _estimate(self, window: int) -> None:
        kept = self._windows[window]
        kept.stale = 0
        identity, kinds = np.divmod(self._rows.profile, _CLASSES)
        mine = self._rows.age > 0
        if window:
            mine &= identity == self._identity[window]
        sample, kind = kept.sample(self._rows.age[mine], kinds[mine], self._clock)
        first = window * (1 + _BINS)
        own = self._limit_of(sample, self._tables[0] if window else _PRIOR)
        self._tables[first] = own
        if not window:
            return
        self._table_of[window] = first
        if np.count_nonzero(sample.ended) < 2 * _MIN_EVENTS:
            return
        edges = np.sort(kind)[len(kind) * np.arange(1, _BINS) // _BINS - 1]
        part = np.searchsorted(edges, kind)
        if not _parts_differ(sample, part, own):
            return
        for index in range(_BINS):
            mask = part == index
            seen = Sample(*(field[mask] for field in sample))
            self._tables[first + 1 + index] = self._limit_of(seen, own)
        self._table_of[window] = first + 1 + np.searchsorted(edges, np.arange(_CLASSES))

    def _limit_of(self, sample: Sample, wider: np.ndarray) -> np.ndarray:
        """The estimate that starts as the wider one, and forgets it as its window fills."""
        known = np.count_nonzero(~sample.running) / self._window_size
        learnt, fixed = 2 * (1 - known), known  # in requests
        prior = (learnt * wider + fixed * _PRIOR) / (learnt + fixed)
        return product_limit(sample, prior, learnt + fixed)


def _parts_differ(sample: Sample, part: np.ndarray, together: np.ndarray) -> bool:
    """Enough data in each part that has any, and their hazards are not the common one's."""
    events = np.bincount(part[sample.ended], minlength=_BINS)
    used = np.unique(part)
    if len(used) < 2 or events[used].min() < _MIN_EVENTS:
        return False
    hazard = -np.log(together)
    exposed = hazard[cell_of(sample.length)] - hazard[cell_of(sample.entry)]
    expected = np.bincount(part, weights=exposed, minlength=_BINS)[used]
    expected *= events.sum() / expected.sum()
    return bool(((events[used] - expected) ** 2 / expected).sum() > _SIGNIFICANT)


LENGTH_MODELS: dict[str, Callable[[], LengthModel]] = {"declared": Declared, "profiled": Profiled}

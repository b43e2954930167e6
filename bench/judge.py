"""What a load got: limits that an answer must keep to count, goodput, percentiles. The same
arithmetic for answers of an engine and of the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bench.load import Answer, Gauges
from scheduler.simulator import ENDINGS, Outcome
from scheduler.workload import Trace

COUNTERS = {  # what is kept of a run: name -> the metrics that are summed
    "recomputed": ("preemptions_total{recompute}",),
    "swapped": ("preemptions_total{swap}",),
    "tokens_again": ("recomputed_tokens_total",),
    "tokens_computed": ("plan_tokens_total{real}",),
    "tokens_padded": ("plan_tokens_total{padded}",),
    "pages_out": ("pages_copied_total{out}",),
    "pages_back": ("pages_copied_total{back}",),
    "refused": (
        "requests_refused_total{requests}",
        "requests_refused_total{tokens}",
        "requests_refused_total{wait}",
    ),
    "compiled": ("compilations_total{serving}",),
}


class Window(NamedTuple):
    """Seconds of a load."""

    begin: float
    end: float


@dataclass(frozen=True, eq=False)
class Served:
    """Times are seconds from the load's start, NaN for what did not happen."""

    due: np.ndarray  # float64[n]
    sent: np.ndarray  # float64[n]
    first: np.ndarray  # float64[n] first token
    last: np.ndarray  # float64[n] last token
    made: np.ndarray  # int64[n] tokens
    complete: np.ndarray  # bool[n]
    refused: np.ndarray  # bool[n]
    cut: np.ndarray  # bool[n] the measurement ended before it did
    prompt_tokens: np.ndarray  # int64[n]

    @classmethod
    def of_answers(cls, answers: Sequence[Answer]) -> Served:
        return cls(
            due=np.array([a.due for a in answers]),
            sent=np.array([a.sent for a in answers]),
            first=np.array([a.times[0] if a.times else math.nan for a in answers]),
            last=np.array([a.times[-1] if a.times else math.nan for a in answers]),
            made=np.array([len(a.times) for a in answers], np.int64),
            complete=np.array([a.whole for a in answers], np.bool_),
            refused=np.array([a.refused for a in answers], np.bool_),
            cut=np.array([math.isnan(a.ended) for a in answers], np.bool_),
            prompt_tokens=np.array([a.prompt_tokens for a in answers], np.int64),
        )

    @classmethod
    def of_outcome(cls, outcome: Outcome, trace: Trace, due: np.ndarray) -> Served:
        """trace: what was simulated, so that arrivals are what an engine's client calls sent.
        due: float64[n] on the same clock."""
        return cls(
            due=due,
            sent=trace.arrival,
            first=outcome.first_at,
            last=outcome.last_at,
            made=outcome.made,
            complete=outcome.complete,
            refused=outcome.ending == ENDINGS.index("refused"),
            cut=np.zeros(len(trace), np.bool_),
            prompt_tokens=trace.prompt_tokens,
        )

    @classmethod
    def joined(cls, parts: Sequence[Served]) -> Served:
        names = cls.__dataclass_fields__
        return cls(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})

    @property
    def ttft(self) -> np.ndarray:
        """float64[n] seconds from when it was due, which may be before it was sent."""
        return self.first - self.due

    @property
    def per_token(self) -> np.ndarray:
        """float64[n] mean seconds of each further token."""
        return (self.last - self.first) / np.maximum(self.made - 1, 1)

    def due_in(self, window: Window) -> np.ndarray:
        """bool[n]"""
        return (self.due >= window.begin) & (self.due < window.end)

    def within(self, window: Window) -> np.ndarray:
        """float64[n]: how many tokens of each came in the window, spread evenly over its time."""
        length = np.maximum(self.last - self.first, 1e-6)
        inside = np.minimum(self.last, window.end) - np.maximum(self.first, window.begin)
        return np.nan_to_num(np.clip(inside / length, 0, 1)) * self.made


@dataclass(frozen=True, slots=True)
class Limits:
    """An answer counts if its first token came within 1 s or ten times what a prompt of its length
    takes alone (`step` seconds and `token` for each of its tokens), and the others within
    `per_token` seconds each, on average."""

    step: float
    token: float
    per_token: float

    @classmethod
    def of_unloaded(cls, served: Served) -> Limits:
        """From requests that ran one at a time; three times their time per token."""
        alone = served.first - served.sent
        slope = float(np.polyfit(served.prompt_tokens, alone, 1)[0])
        token = max(slope, 0.0)  # a disturbed measurement can have it fall
        step = max(float(np.mean(alone - token * served.prompt_tokens)), 0.0)
        return cls(step, token, 3 * float(np.median(served.per_token)))

    def ttft(self, prompt_tokens: np.ndarray) -> np.ndarray:
        """float64[n] seconds"""
        return np.maximum(1.0, 10 * (self.step + self.token * prompt_tokens))

    def met(self, served: Served) -> np.ndarray:
        """bool[n]; one that the end of the measurement cut off is judged by what it had."""
        near = 1e-8  # sums of simulated step times are not exact
        fast = (served.ttft <= self.ttft(served.prompt_tokens) + near) & (
            served.per_token <= self.per_token + near
        )
        return (served.complete | served.cut) & fast


@dataclass(eq=False)
class Run:
    """One load on one machine."""

    served: Served
    counters: dict[str, float]  # by the names of COUNTERS
    series: dict[str, list[float]]  # at, running, waiting, held, cached, reserved
    most_preemptions: int
    last: Gauges = field(default_factory=Gauges)  # of an engine, when it is idle again
    answers: Sequence[Answer] = ()  # of an engine

    def throughput(self, window: Window) -> float:
        """Output tokens a second."""
        return float(self.served.within(window).sum()) / (window.end - window.begin)

    def goodput(self, window: Window, limits: Limits) -> float:
        """The same, of answers within the limits."""
        good = self.served.within(window)[limits.met(self.served)]
        return float(good.sum()) / (window.end - window.begin)

    def attainment(self, window: Window, limits: Limits) -> float:
        """The share of the requests due that are within the limits."""
        due = self.served.due_in(window)
        return float(limits.met(self.served)[due].mean()) if due.any() else math.nan

    @property
    def end(self) -> float:
        """Seconds, of the last token."""
        return float(np.nanmax(self.served.last))

    @property
    def share_again(self) -> float:
        """Of all computed tokens, those that had been computed before."""
        return self.counters["tokens_again"] / max(self.counters["tokens_computed"], 1)


def percentile(values: np.ndarray, share: float) -> float:
    """NaN values are left out; NaN if there are no others."""
    values = values[~np.isnan(values)]
    return float(np.percentile(values, share)) if len(values) else math.nan

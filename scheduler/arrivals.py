"""Generated traces: gamma arrivals whose rate changes in phases, lengths resampled or lognormal.

Randomness lives here, outside the Scheduler, in a numpy Generator that the caller seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.workload import Trace


class Lengths(Protocol):
    """Where generated requests have their lengths from."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(prompt tokens, output tokens), int64[count] each, all at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Resampled:
    """Pairs of a given trace, drawn with replacement."""

    trace: Trace

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.integers(0, len(self.trace), count)
        return self.trace.prompt_tokens[chosen], self.trace.output_tokens[chosen]


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Tokens around `mean`, rounded and clipped to [low, high]; sigma is that of the logarithm."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        draws = rng.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.rint(draws), max(self.low, 1), self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompts and outputs that say nothing of each other."""

    prompt: Lognormal
    output: Lognormal

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.prompt.draw(rng, count), self.output.draw(rng, count)


@dataclass(frozen=True, slots=True)
class Phase:
    """For so many seconds the rate is multiplied by `factor`."""

    seconds: float
    factor: float


def gamma_arrivals(
    rng: np.random.Generator,
    rate: float,
    cv: float,
    *,
    count: int | None = None,
    seconds: float | None = None,
    phases: Sequence[Phase] = (),
) -> np.ndarray:
    """float64[n] ascending times of a gamma renewal process: `rate` a second, gaps with coefficient
    of variation `cv` (1: Poisson; 0: evenly spaced). Ends after `count` or before `seconds`.

    Phases follow one another and then begin anew; bursts keep their shape, as time itself is what
    they stretch.
    """
    assert (count is None) != (seconds is None), "count or seconds"
    phases = phases or (Phase(1.0, 1.0),)
    times = np.cumsum([0.0, *(phase.seconds for phase in phases)])
    # the clock that gaps are counted on: it runs `rate * factor` times as fast as time
    ticks = np.cumsum([0.0, *(rate * phase.seconds * phase.factor for phase in phases)])
    assert ticks[-1] > 0, "some phase has arrivals"

    def at(tick: np.ndarray) -> np.ndarray:
        cycle, rest = np.divmod(tick, ticks[-1])
        return cycle * times[-1] + np.interp(rest, ticks, times)

    def gaps(number: int) -> np.ndarray:
        return rng.gamma(cv**-2, cv**2, number) if cv else np.ones(number)

    if count is not None:
        return at(np.cumsum(gaps(count)))
    assert seconds is not None
    drawn = [np.zeros(0)]
    total = 0.0
    while total == 0.0 or at(np.array([total]))[0] < seconds:
        drawn.append(total + np.cumsum(gaps(4096)))
        total = float(drawn[-1][-1])
    arrival = at(np.concatenate(drawn))
    return arrival[arrival < seconds]


def generate(rng: np.random.Generator, arrival: np.ndarray, lengths: Lengths) -> Trace:
    """A request of drawn lengths for each arrival time."""
    prompt, output = lengths.draw(rng, len(arrival))
    return Trace(arrival=arrival, prompt_tokens=prompt, output_tokens=output)

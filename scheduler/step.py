"""Step: one iteration's decision, what comes back of it, and what a commit makes of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.plan import BatchPlan
from scheduler.request import Sequence
from scheduler.tiers import NO_COPIES, PageCopies

# (sequence, its new token) -> why the text that the token makes ends the sequence, if it does
TextEnds = Callable[[Sequence, int], str | None]


class StepOutput(Protocol):
    """What a step sampled, in row order. Rows that sample nothing hold garbage."""

    @property
    def tokens(self) -> np.ndarray: ...  # int32[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A row whose step fills pages: once it has finished, others can share them."""

    sequence: Sequence
    num_computed: int
    num_preemptions: int  # the sequence's at the time: once it has more, its pages are others


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One iteration's decision. `sampled` names the rows whose token counts: (row, sequence).

    copies: what the runner copies between the tiers before the step. use_sampler: some row wants
    more than its likeliest token."""

    plan: BatchPlan
    sampled: tuple[tuple[int, Sequence], ...]
    filled: tuple[Filled, ...] = ()
    copies: PageCopies = NO_COPIES
    use_sampler: bool = False
    wants_logprobs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """One token that a commit accepted, and the row of the step's output that it came from."""

    sequence: Sequence
    row: int
    token: int

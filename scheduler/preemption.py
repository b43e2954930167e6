"""Which row goes when pages run out, and whether its pages are copied to the host or computed
anew.

A row never preempts one that is more important or, at equal importance, older; so the oldest of the
most important rows always advances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.policy import QueuePolicy
from scheduler.request import Sequence

# A sequence that was preempted this often returns only when all that it may ever need is set aside
# for it, and is not preempted again.
MAX_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Seconds, as measured at warm-up. Without a measurement copying is taken to be free."""

    copy_base: float = 0.0  # of one call that copies pages
    copy_out: float = 0.0  # of a page, device to host
    copy_back: float = 0.0  # of a page, host to device
    prefill: float = 1.0  # of a prompt token

    def swap(self, num_pages: int) -> float:
        """Copy pages out now and back later."""
        return 2 * self.copy_base + num_pages * (self.copy_out + self.copy_back)

    def recompute(self, num_tokens: int) -> float:
        return num_tokens * self.prefill

    def prefers_swap(self, num_pages: int, page_size: int) -> bool:
        return self.swap(num_pages) < self.recompute(num_pages * page_size)


def is_protected(sequence: Sequence) -> bool:
    return sequence.num_preemptions >= MAX_PREEMPTIONS


def choose_victim(
    running: Iterable[Sequence], claimant: Sequence, policy: QueuePolicy
) -> Sequence | None:
    """The row that makes room for the claimant, which runs as well: the least important one, then
    the one whose preemption loses the fewest computed tokens, then the youngest."""
    candidates = [
        sequence
        for sequence in running
        if sequence is not claimant
        and not is_protected(sequence)
        and (
            policy.outranks(claimant, sequence)
            or (sequence.order > claimant.order and not policy.outranks(sequence, claimant))
        )
    ]
    return min(candidates, key=_cheapest_first, default=None)


def may_replace(
    running: Iterable[Sequence], waiting: Sequence, policy: QueuePolicy
) -> list[Sequence]:
    """The rows whose place a waiting sequence may take, the first to go first."""
    rows = [s for s in running if policy.outranks(waiting, s) and not is_protected(s)]
    return sorted(rows, key=_cheapest_first)


def _cheapest_first(sequence: Sequence) -> tuple[int, int, int]:
    lost = sequence.num_computed - sequence.num_shared
    return (-sequence.request.options.priority, lost, -sequence.order)

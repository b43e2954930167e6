"""What must hold of a scheduler after every call: the page ledger, and that the mirrors agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.preemption import is_protected
from scheduler.request import Status

if TYPE_CHECKING:
    from scheduler.core import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError that says which invariant is broken."""
    scheduler.cache.check(scheduler.running, scheduler.waiting)
    promised = sum(
        scheduler.rows.lacks(s, s.num_prompt + s.request.max_tokens - s.num_computed)
        for s in scheduler.running
        if is_protected(s)
    )
    assert scheduler.rows.promised == promised
    assert scheduler.cache.num_available >= promised, "a protected row could be without a page"
    assert scheduler.stats.queue_tokens == sum(len(s.tokens) for s in scheduler.waiting)
    assert [s.order for s in scheduler.running] == sorted(s.order for s in scheduler.running)
    assert len(scheduler.running) + scheduler.slots.num_free == scheduler.config.max_rows
    assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
    assert len(scheduler.running) + len(scheduler.waiting) == sum(1 for _ in scheduler.sequences())
    for sequence in scheduler.running:
        slot, count = sequence.slot, len(sequence.pages)
        assert sequence.status is Status.RUNNING
        assert scheduler.slots.block_tables[slot, :count].tolist() == sequence.pages
        assert scheduler.slots.num_pages[slot] == count
        assert scheduler.slots.computed[slot] == sequence.num_computed
        assert scheduler.slots.target[slot] == sequence.num_tokens
        assert sequence.num_computed <= count * scheduler.config.page_size
        assert sequence.num_computed <= sequence.num_tokens
        assert sequence.num_output <= sequence.request.max_tokens
        assert len(sequence.hashes) - 1 <= len(sequence.tokens) // scheduler.config.page_size
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING
        assert not sequence.pages
        assert sequence.slot == -1
        assert sequence.num_computed == 0
    if not scheduler.running:
        assert scheduler.cache.pool.num_held == 0, "idle, but pages are held"

"""Whose pages are whose: salts, no prefix cache, and a cache that is lost while others rely on it.
Pages have four tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.preemption import PreemptionCosts
from scheduler.request import Request, RequestOptions, Sequence, Status

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]
FREE_COPIES = PreemptionCosts()


def salted(salt: str) -> RequestOptions:
    return RequestOptions(cache_salt=salt)


# ---- cache_salt ----


def test_a_salt_hides_pages_in_host_memory_too(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, num_host_pages=8, prefix_cache=True, costs=FREE_COPIES)
    for number in (1, 2):  # twice, for what is used once is not kept
        scheduler.add(make_request(number, 12, 1, options=salted("a")))
        scheduler.advance()
    scheduler.add(make_request(3, [9] * 15, 1))
    scheduler.advance()
    assert scheduler.stats.host_pages["cached"] == 2
    scheduler.add(make_request(4, 12, 1, options=salted("b")))
    step = scheduler.schedule(0.0)
    assert (scheduler.rows_of(step), step.copies.back) == ([(4, 12)], ())
    scheduler.give(step)
    scheduler.add(make_request(5, 12, 1, options=salted("a")))
    step = scheduler.schedule(0.0)
    assert scheduler.rows_of(step) == [(5, 4)]
    assert len(step.copies.back) == 2
    scheduler.give(step)


def test_a_salted_row_finds_its_own_pages_after_preemption(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, prefix_cache=True)
    scheduler.add(make_request(1, 7, 6, options=salted("a")))
    second = scheduler.add(make_request(2, 7, 6, options=salted("b")))
    while second.num_preemptions == 0 or second.status is Status.WAITING:
        rows = scheduler.advance()
    # of its two pages the last one was taken; the other row's equal tokens don't count
    assert rows == [(2, 5)]
    scheduler.finish_all()


@pytest.mark.parametrize("salt", ["", "1", "id:1", "salt:"])
def test_no_salt_opens_what_is_not_shared(
    make_scheduler: MakeScheduler, make_request: MakeRequest, salt: str
) -> None:
    scheduler = make_scheduler(prefix_cache=False)
    scheduler.add(make_request(1, 8, 9))
    scheduler.advance()
    scheduler.add(make_request(2, 8, 1, options=salted(salt)))
    assert scheduler.advance() == [(1, 1), (2, 8)]


# ---- no prefix cache ----


@pytest.mark.parametrize("num_host_pages", [0, 8])
def test_preemption_without_a_prefix_cache(
    make_scheduler: MakeScheduler, make_request: MakeRequest, num_host_pages: int
) -> None:
    """vllm#18115, vllm PR#21809: recompute relied on the cache. Here a preempted row finds what is
    left of its own pages, never those of others with equal tokens, and nothing stays after it."""
    scheduler = make_scheduler(
        num_pages=4, num_host_pages=num_host_pages, prefix_cache=False, costs=FREE_COPIES
    )
    first, second = (scheduler.add(make_request(n, 7, 6)) for n in (1, 2))
    while list(scheduler.sequences()):
        scheduler.advance()
        assert not set(first.pages) & set(second.pages)
    assert second.num_preemptions == 1
    assert first.tokens == second.tokens
    assert len(first.tokens) == 13
    assert (scheduler.cache.pool.num_free, scheduler.cache.pool.num_cached) == (4, 0)
    assert scheduler.cache.host.num_held == 0


def test_pages_of_ended_requests_leave_the_host_to_others(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """Nobody can ever find them, so they must not crowd out what a preempted row will want."""
    scheduler = make_scheduler(num_pages=4, num_host_pages=2, costs=FREE_COPIES)
    for number in range(0, 40, 2):
        first, second = (scheduler.add(make_request(number + i, 7, 6)) for i in (0, 1))
        scheduler.finish_all()
        assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert scheduler.stats.preemptions == {"recompute": 0, "swap": 20}
    assert scheduler.stats.recomputed_tokens == 0


# ---- the cache is lost ----


def swapped_rows(make_scheduler: MakeScheduler, make_request: MakeRequest) -> Any:
    """One row runs; two others have claimed what the host keeps for them."""
    scheduler = make_scheduler(num_pages=6, num_host_pages=8, costs=FREE_COPIES)
    sequences: list[Sequence] = [scheduler.add(make_request(n, 7, 17)) for n in (1, 2, 3)]
    while not (sequences[1].claims and sequences[2].claims):
        scheduler.advance()
    assert scheduler.cache.host.num_held > 0
    return scheduler, sequences


def test_claims_end_with_the_cache(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """sglang-jax PR#230: after a failed step nothing that was lost may be relied on."""
    scheduler, sequences = swapped_rows(make_scheduler, make_request)
    scheduler.schedule(0.0)
    assert scheduler.preempt_all() == sequences[:1]
    scheduler.check_invariants()
    assert [s.claims for s in sequences] == [[], [], []]
    host = scheduler.cache.host
    assert (host.num_free, host.num_cached, host.num_held) == (8, 0, 0)
    first_chunks: dict[int, int] = {}
    while list(scheduler.sequences()):
        for number, length in scheduler.advance():
            first_chunks.setdefault(number, length)
    assert sorted(first_chunks) == [1, 2, 3]
    assert min(first_chunks.values()) > 7, "each began with its prompt again"
    assert [len(s.tokens) for s in sequences] == [24] * 3
    assert scheduler.cache.host.num_held == scheduler.cache.pool.num_held == 0


@pytest.mark.parametrize("end", ["abort", "expire", "fail again"])
def test_a_row_that_lost_its_claims_ends_like_any_other(
    make_scheduler: MakeScheduler, make_request: MakeRequest, end: str
) -> None:
    scheduler, sequences = swapped_rows(make_scheduler, make_request)
    scheduler.preempt_all()
    if end == "fail again":
        scheduler.preempt_all()
    for sequence in sequences:
        if end == "abort":
            scheduler.abort(sequence.request.request_id)
        else:
            scheduler.finish(sequence, "timeout" if end == "expire" else "error")
        scheduler.check_invariants()
    assert scheduler.cache.host.num_free == 8
    assert scheduler.cache.pool.num_free == 6
    assert scheduler.stats.queue_tokens == 0


def test_copies_of_a_lost_step_are_not_made_later(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler, _ = swapped_rows(make_scheduler, make_request)
    scheduler.schedule(0.0)
    scheduler.preempt_all()
    step = scheduler.schedule(0.0)
    assert (step.copies.out, step.copies.back) == ((), ())
    scheduler.give(step)
    scheduler.finish_all()

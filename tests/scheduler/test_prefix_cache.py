"""Prefix hits, host pages and swapping with exact values. Pages have four tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.preemption import PreemptionCosts
from scheduler.request import Request, RequestOptions, Status
from scheduler.tiers import HostTier, PageCopies

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]
FREE_COPIES = PreemptionCosts()
DEAR_COPIES = PreemptionCosts(copy_out=100.0)
NO_COPIES = PageCopies()


def test_a_prefix_is_computed_once(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request(1, 10, 3))
    assert scheduler.advance() == [(1, 10)]
    scheduler.add(make_request(2, 10, 3))
    # two full pages are there; the third is the first one's own
    assert scheduler.advance() == [(1, 1), (2, 2)]
    first, second = scheduler.running
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert scheduler.stats.prefix_tokens == {"queried": 20, "hit": 8, "hit_host": 0}
    scheduler.finish_all()
    assert first.tokens == second.tokens


def test_a_full_hit_still_computes_the_last_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """nano-vllm had a query of length zero here."""
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request(1, 8, 1))
    assert scheduler.advance() == [(1, 8)]
    scheduler.add(make_request(2, 8, 1))
    assert scheduler.advance() == [(2, 4)]
    assert scheduler.stats.prefix_tokens["hit"] == 4


def test_pages_of_a_step_in_flight_are_not_shared(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """nano-vllm shared pages of a running prefill before they were written."""
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request(1, 8, 4))
    step = scheduler.schedule(0.0)
    scheduler.add(make_request(2, 8, 4))
    ahead = scheduler.schedule(0.0)
    assert scheduler.rows_of(ahead) == [(1, 1), (2, 8)]
    scheduler.give(step)
    scheduler.give(ahead)
    first, second = scheduler.running
    assert not set(first.pages) & set(second.pages)


def test_output_is_shared_as_well(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    """A chat's next turn holds the answer of the one before it."""
    scheduler = make_scheduler(prefix_cache=True)
    first = scheduler.add(make_request(1, 6, 7))
    scheduler.finish_all()
    # 12 tokens were computed: the last one sampled was not
    scheduler.add(make_request(2, [*first.tokens, 55], 1))
    assert scheduler.advance() == [(2, 2)]


def test_other_salts_share_nothing(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(prefix_cache=True)
    for number, salt in enumerate(["a", "b", "a"], start=1):
        scheduler.add(make_request(number, 8, 1, options=RequestOptions(cache_salt=salt)))
        assert scheduler.advance() == [(number, 8 if number < 3 else 4)]


def test_without_the_cache_nothing_is_shared_and_nothing_stays(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(prefix_cache=False)
    for number in (1, 2):
        scheduler.add(make_request(number, 8, 1))
        assert scheduler.advance() == [(number, 8)]
    assert scheduler.cache.pool.num_free == 64


def test_the_end_of_a_chain_is_evicted_first(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, prefix_cache=True)
    scheduler.add(make_request(1, 12, 1))
    scheduler.advance()
    assert (scheduler.cache.pool.num_free, scheduler.cache.pool.num_cached) == (1, 3)
    scheduler.add(make_request(2, [9] * 6, 1))  # two pages: the free one and the last of 1
    scheduler.advance()
    scheduler.add(make_request(3, 12, 1))
    assert scheduler.advance() == [(3, 4)], "the first two are still there"


def test_phantom_hits_do_not_survive_eviction(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """local-inference-lab/vllm#480."""
    scheduler = make_scheduler(num_pages=4, prefix_cache=True)
    scheduler.add(make_request(1, 12, 1))
    scheduler.advance()
    scheduler.add(make_request(2, [9] * 15, 1))
    scheduler.advance()
    scheduler.add(make_request(3, 12, 1))
    assert scheduler.advance() == [(3, 12)]
    assert scheduler.stats.prefix_tokens["hit"] == 0


def test_an_abort_in_the_middle_of_a_prompt_leaves_the_pages_that_were_done(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """llama.cpp#29163."""
    scheduler = make_scheduler(prefix_cache=True, max_num_batched_tokens=6)
    scheduler.add(make_request(1, 20, 1))
    assert scheduler.advance() == [(1, 6)]
    step = scheduler.schedule(0.0)
    scheduler.abort("1")
    scheduler.give(step)
    assert scheduler.cache.pool.num_held == 0
    scheduler.add(make_request(2, 20, 1))
    assert scheduler.advance() == [(2, 6)]
    assert scheduler.stats.prefix_tokens["hit"] == 4


def preempt_one(make_scheduler: MakeScheduler, make_request: MakeRequest, **settings: Any) -> Any:
    """Two rows of 8 tokens and their next in four pages, then one of them must go."""
    scheduler = make_scheduler(num_pages=4, prefix_cache=False, **settings)
    for number in (1, 2):
        scheduler.add(make_request(number, 7, 6))
    assert scheduler.advance() == [(1, 7), (2, 7)]
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert scheduler.running[0].num_computed == 8
    return scheduler


def test_a_swapped_row_comes_back_without_computing_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = preempt_one(make_scheduler, make_request, num_host_pages=8, costs=FREE_COPIES)
    second = scheduler.running[1]
    last = second.pages[1]
    step = scheduler.schedule(0.0)
    assert scheduler.rows_of(step) == [(1, 1)]
    # the end of its chain made room, and went to the host
    assert step.copies == PageCopies(out=((last, 0),))
    assert scheduler.stats.preemptions == {"recompute": 0, "swap": 1}
    assert (second.status, second.num_computed, second.pages) == (Status.WAITING, 0, [])
    scheduler.give(step)
    scheduler.check_invariants()
    while second.status is Status.WAITING:
        step = scheduler.schedule(0.0)
        scheduler.give(step)
    # its first page was never taken, its second one comes back; one token is left to compute
    assert scheduler.rows_of(step) == [(2, 1)]
    [(host, page)] = step.copies.back
    assert (host, page) == (0, second.pages[1])
    assert scheduler.stats.recomputed_tokens == 0
    assert scheduler.stats.pages_copied == {"out": 1, "back": 1}
    scheduler.finish_all()
    assert scheduler.cache.host.num_held == 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_host_pages": 8, "costs": DEAR_COPIES}, id="copies cost more"),
        pytest.param({"num_host_pages": 1, "costs": FREE_COPIES}, id="host full (vllm#787)"),
        pytest.param({"num_host_pages": 0, "costs": FREE_COPIES}, id="no host"),
    ],
)
def test_a_row_that_is_not_swapped_computes_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest, settings: dict[str, Any]
) -> None:
    scheduler = preempt_one(make_scheduler, make_request, **settings)
    second = scheduler.running[1]
    copies = []
    while second.num_preemptions == 0 or second.status is Status.WAITING:
        step = scheduler.schedule(0.0)
        copies.append(step.copies)
        scheduler.give(step)
    assert set(copies) == {NO_COPIES}
    assert scheduler.rows_of(step) == [(2, 5)], "its first page was still on the device"
    assert scheduler.stats.preemptions == {"recompute": 1, "swap": 0}
    assert scheduler.stats.recomputed_tokens == 4
    scheduler.finish_all()


def test_an_evicted_prefix_comes_back_from_the_host(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, num_host_pages=8, prefix_cache=True, costs=FREE_COPIES)
    for number, computed in ((1, 12), (2, 4)):
        scheduler.add(make_request(number, 12, 1))
        assert scheduler.advance() == [(number, computed)]
    scheduler.add(make_request(3, [9] * 15, 1))
    step = scheduler.schedule(0.0)
    # the third page was never asked for again: it is not worth a copy
    assert step.copies == PageCopies(out=((2, 0), (1, 1)))
    scheduler.give(step)
    scheduler.add(make_request(4, 12, 1))
    step = scheduler.schedule(0.0)
    assert scheduler.rows_of(step) == [(4, 4)]
    assert [host for host, _ in step.copies.back] == [1, 0], "in the order of the prompt"
    assert scheduler.stats.prefix_tokens == {"queried": 51, "hit": 8, "hit_host": 8}
    scheduler.give(step)


def test_a_failed_step_trusts_no_page_any_more(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = preempt_one(make_scheduler, make_request, num_host_pages=8, costs=FREE_COPIES)
    scheduler.schedule(0.0)
    scheduler.preempt_all()
    scheduler.check_invariants()
    assert scheduler.cache.pool.num_free == 4
    assert scheduler.cache.host.num_free == 8
    assert scheduler.advance()[0] == (1, 9)


@pytest.mark.parametrize("when", ["swapped", "loading"])
def test_an_abort_leaves_nothing_on_the_host_held(
    make_scheduler: MakeScheduler, make_request: MakeRequest, when: str
) -> None:
    """vllm#45387, LMCache#3688."""
    scheduler = preempt_one(make_scheduler, make_request, num_host_pages=8, costs=FREE_COPIES)
    second = scheduler.running[1]
    scheduler.give(scheduler.schedule(0.0))
    assert second.status is Status.WAITING
    assert scheduler.cache.host.num_held == 1
    if when == "loading":
        scheduler.abort("1")
        step = scheduler.schedule(0.0)
        assert step.copies.back
        scheduler.abort("2")
        scheduler.give(step)
    else:
        scheduler.abort("2")
        scheduler.abort("1")
    scheduler.check_invariants()
    assert scheduler.cache.host.num_held == 0
    assert scheduler.cache.pool.num_held == 0
    assert scheduler.schedule(0.0) is None


def test_claims_are_all_or_none_and_push_unclaimed_pages_out() -> None:
    tier = HostTier(2)
    assert tier.put(b"a") == 0
    assert tier.put(b"b") == 1
    assert tier.put(b"c") is None, "both are being written"
    tier.planned()
    assert (tier.find(b"a"), tier.num_cached) == (0, 2)
    tier.touch(b"a")
    assert tier.claim([b"b", b"c"])
    assert not tier.claim([b"d"])
    assert (tier.num_held, tier.num_cached, tier.num_free) == (1, 1, 0)
    assert tier.put(b"c") == 0, "the claimed one stays, although it is older"
    tier.planned()
    assert tier.find(b"a") is None
    tier.check([b"b", b"c"])
    tier.release([b"b", b"c"])
    tier.check([])
    assert (tier.num_held, tier.num_cached) == (0, 2)

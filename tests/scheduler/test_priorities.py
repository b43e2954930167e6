"""Priorities with exact values: who takes whose place, and who never does. Pages have four tokens.

Lower values are more important. Field note 11 (vllm#40004, vllm PR#54530): an important request
must not wait behind unimportant ones, and equals must not push each other out in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.policy import Fcfs, Priority
from scheduler.preemption import MAX_PREEMPTIONS
from scheduler.request import Request, RequestOptions, Sequence, Status

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]

LOW = RequestOptions(priority=5)
LOWER = RequestOptions(priority=9)
HIGH = RequestOptions(priority=-1)


def waiting(scheduler: Any) -> set[int]:
    return {sequence.order for sequence in scheduler.waiting}


def running(scheduler: Any) -> list[int]:
    return [sequence.order for sequence in scheduler.running]


def num_preempted(scheduler: Any) -> int:
    return sum(scheduler.stats.preemptions.values())


# ---- for a slot ----


def test_one_important_request_takes_one_of_two_slots(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """vllm#40004: with all slots taken, an important request waited for unimportant ones."""
    scheduler = make_scheduler(Priority(), max_num_seqs=2)
    first, second = (scheduler.add(make_request(n, 4, 40, options=LOW)) for n in (1, 2))
    assert scheduler.advance() == [(1, 4), (2, 4)]
    high = scheduler.add(make_request(3, 4, 3, options=HIGH))
    # equally unimportant and as far: the younger one goes
    assert scheduler.advance() == [(1, 1), (3, 4)]
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    assert [scheduler.advance() for _ in range(2)] == [[(1, 1), (3, 1)]] * 2
    assert high.finish_reason == "length"
    # its page was still there, so only the token that it had made is left to compute; it stays
    assert scheduler.advance() == [(1, 1), (2, 1)]
    scheduler.finish_all()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert [len(s.tokens) for s in (first, second, high)] == [44, 44, 7]
    assert scheduler.stats.preemptions == {"recompute": 1, "swap": 0}


def test_equals_wait_for_equals(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    """vllm PR#54530: equal priorities preempted each other in turns."""
    scheduler = make_scheduler(Priority(), max_num_seqs=2)
    ended = []
    sequences = [scheduler.add(make_request(n, 4, 6, options=LOW)) for n in range(6)]
    for _ in range(100):
        if not list(scheduler.sequences()):
            break
        scheduler.advance()
        ended += [s.order for s in sequences if s.finish_reason and s.order not in ended]
    assert ended == [0, 1, 2, 3, 4, 5]
    assert num_preempted(scheduler) == 0


def test_under_fcfs_nobody_is_preempted_for_a_slot(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Fcfs(), max_num_seqs=1)
    scheduler.add(make_request(1, 4, 2, options=LOW))
    assert scheduler.advance() == [(1, 4)]
    scheduler.add(make_request(2, 4, 1, options=HIGH))
    assert scheduler.advance() == [(1, 1)]


def test_a_preempted_one_comes_back_before_those_that_came_after_it(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=2)
    for number in (1, 2, 3):
        scheduler.add(make_request(number, 4, 40, options=LOW))
    assert scheduler.advance() == [(1, 4), (2, 4)]
    scheduler.add(make_request(4, 4, 1, options=HIGH))
    assert scheduler.advance() == [(1, 1), (4, 4)]
    assert waiting(scheduler) == {1, 2}
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert waiting(scheduler) == {2}


def test_the_least_important_goes_first_then_the_least_work_lost(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=3)
    scheduler.add(make_request(1, 8, 40, options=LOWER))
    scheduler.add(make_request(2, 4, 40, options=LOW))
    scheduler.add(make_request(3, 4, 40, options=LOW))
    assert scheduler.advance() == [(2, 4), (3, 4), (1, 8)]
    left = []
    for number in (4, 5, 6):
        scheduler.add(make_request(number, 1, 50, options=HIGH))
        scheduler.advance()
        left.append(waiting(scheduler))
    # although it has done most; then, as far as the third, the youngest
    assert left == [{0}, {0, 2}, {0, 1, 2}]


def test_the_row_that_loses_least_goes_although_it_is_older(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=2)
    scheduler.add(make_request(1, 3, 40, options=LOW))
    scheduler.add(make_request(2, 10, 40, options=LOW))
    assert scheduler.advance() == [(1, 3), (2, 10)]
    scheduler.add(make_request(3, 1, 9, options=HIGH))
    assert scheduler.advance() == [(2, 1), (3, 1)]


def test_what_is_shared_is_not_lost(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=2, prefix_cache=True)
    scheduler.add(make_request(1, 12, 1))
    assert scheduler.advance() == [(1, 12)]
    scheduler.add(make_request(2, [5] * 6, 40, options=LOW))
    scheduler.add(make_request(3, 12, 40, options=LOW))
    assert scheduler.advance() == [(2, 6), (3, 4)]
    scheduler.add(make_request(4, 1, 9, options=HIGH))
    # 12 tokens were computed for the third, 4 of them by itself
    assert scheduler.advance() == [(2, 1), (4, 1)]


def test_two_important_ones_are_there_within_two_steps(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=2)
    for number in (1, 2):
        scheduler.add(make_request(number, 4, 40, options=LOW))
    scheduler.advance()
    for number in (3, 4):
        scheduler.add(make_request(number, 4, 40, options=HIGH))
    scheduler.advance()
    scheduler.advance()
    assert running(scheduler) == [2, 3]
    assert num_preempted(scheduler) == 2


@pytest.mark.parametrize("prompt", [40, 400])
def test_a_less_important_prompt_does_not_keep_an_important_one_waiting(
    make_scheduler: MakeScheduler, make_request: MakeRequest, prompt: int
) -> None:
    """Whoever gives way does so for something: the one that it made place for starts."""
    scheduler = make_scheduler(
        Priority(), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=500, num_pages=200
    )
    scheduler.add(make_request(1, 2, 40, options=LOW))
    assert scheduler.advance() == [(1, 2)]
    scheduler.add(make_request(2, prompt, 1, options=LOW))
    assert scheduler.advance() == [(1, 1), (2, 7)]
    high = scheduler.add(make_request(3, 2, 2, options=HIGH))
    scheduler.advance()
    assert num_preempted(scheduler) == 1
    assert high.num_output == 1


def test_nobody_gives_way_while_the_budget_goes_to_equals(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """An older prompt, as important, takes all tokens of a step: a slot alone helps nobody."""
    scheduler = make_scheduler(Priority(), max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(make_request(1, 2, 40, options=LOW))
    assert scheduler.advance() == [(1, 2)]
    scheduler.add(make_request(2, 30, 9, options=HIGH))
    assert scheduler.advance() == [(1, 1), (2, 7)]
    scheduler.add(make_request(3, 2, 9, options=HIGH))
    assert [scheduler.advance() for _ in range(3)] == [[(1, 1), (2, 7)]] * 3
    assert scheduler.advance() == [(2, 2), (3, 2)]
    assert num_preempted(scheduler) == 1


# ---- for pages ----


def test_only_as_many_give_way_as_are_needed(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """Three rows of two pages each fill the pool; two of them make room for four pages."""
    scheduler = make_scheduler(Priority(), num_pages=6, max_num_batched_tokens=32)
    for number in (1, 2, 3):
        scheduler.add(make_request(number, 5, 9, options=LOW))
    assert scheduler.advance() == [(1, 5), (2, 5), (3, 5)]
    scheduler.add(make_request(4, 12, 1, options=HIGH))
    assert scheduler.advance() == [(1, 1), (4, 12)]
    assert waiting(scheduler) == {1, 2}
    scheduler.finish_all()


def test_nobody_gives_way_in_vain(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    """The place of all less important rows together would not be enough."""
    scheduler = make_scheduler(Priority(), num_pages=6)
    scheduler.add(make_request(1, 13, 3, options=HIGH))
    scheduler.add(make_request(2, 2, 3, options=LOW))
    assert scheduler.advance() == [(1, 13), (2, 2)]
    scheduler.add(make_request(3, 10, 1, options=HIGH))  # three pages; one is free, one the low's
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert num_preempted(scheduler) == 0
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert scheduler.advance() == [(3, 10)]
    assert num_preempted(scheduler) == 0


@pytest.mark.parametrize("options", [(HIGH, LOW), (LOW, HIGH)], ids=["high first", "low first"])
def test_pages_shared_with_one_that_stays_are_not_gained(
    make_scheduler: MakeScheduler, make_request: MakeRequest, options: tuple[RequestOptions, ...]
) -> None:
    """A prefix that an important row holds too stays held when the other one gives way."""
    scheduler = make_scheduler(Priority(), num_pages=8, prefix_cache=True)
    for number, treated in enumerate(options, start=1):
        scheduler.add(make_request(number, 14, 5, options=treated))
        scheduler.advance()
    first, second = scheduler.running
    assert first.pages[:3] == second.pages[:3]
    assert scheduler.cache.num_available == 3
    # five pages: the three, and only one of the four that the low one holds is its own
    scheduler.add(make_request(3, [9] * 16, 1, options=HIGH))
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert num_preempted(scheduler) == 0
    scheduler.finish_all()


def test_pages_that_the_newcomer_shares_are_not_gained_either(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """It needs the low one's prefix itself: that must not count twice."""
    scheduler = make_scheduler(Priority(), num_pages=8, prefix_cache=True)
    scheduler.add(make_request(1, [9] * 13, 8, options=HIGH))
    assert scheduler.advance() == [(1, 13)]
    low = scheduler.add(make_request(2, 9, 20, options=LOW))
    assert scheduler.advance() == [(1, 1), (2, 9)]
    assert scheduler.cache.num_available == 1
    # five pages, two of them the low one's: with its third page that makes four
    scheduler.add(make_request(3, [*range(100, 108), *[8] * 9], 1, options=HIGH))
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert low.num_preemptions == 0
    scheduler.finish_all()


def test_pages_that_only_those_share_who_give_way_are_gained(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """Two rows share three pages whose first owner has ended: both together set them free."""
    limits = {"num_pages": 8, "max_num_batched_tokens": 32}
    scheduler = make_scheduler(Priority(), prefix_cache=True, **limits)
    scheduler.add(make_request(1, [9, 9], 8, options=HIGH))
    scheduler.add(make_request(2, 12, 1, options=LOW))
    assert scheduler.advance() == [(1, 2), (2, 12)]
    for number in (3, 4):
        scheduler.add(make_request(number, 14, 9, options=LOW))
    assert scheduler.advance() == [(1, 1), (3, 2), (4, 2)]
    assert scheduler.cache.num_available == 2
    scheduler.add(make_request(5, [8] * 20, 1, options=HIGH))  # six pages
    assert scheduler.advance() == [(1, 1), (5, 20)]
    assert num_preempted(scheduler) == 2
    scheduler.finish_all()


def test_a_running_row_takes_pages_from_a_less_important_older_one(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), num_pages=4)
    scheduler.add(make_request(1, 6, 6, options=LOW))
    scheduler.add(make_request(2, 6, 6, options=HIGH))
    assert sorted(scheduler.advance()) == [(1, 6), (2, 6)]
    assert [scheduler.advance() for _ in range(2)] == [[(1, 1), (2, 1)]] * 2
    assert scheduler.advance() == [(2, 1)]
    assert (running(scheduler), waiting(scheduler)) == ([1], {0})
    scheduler.finish_all()


def test_a_running_row_waits_rather_than_take_pages_from_a_more_important_younger_one(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), num_pages=4)
    low = scheduler.add(make_request(1, 7, 5, options=LOW))
    high = scheduler.add(make_request(2, 5, 4, options=HIGH))
    assert sorted(scheduler.advance()) == [(1, 7), (2, 5)]
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert [scheduler.advance() for _ in range(2)] == [[(2, 1)]] * 2
    assert high.finish_reason == "length"
    assert low.status is Status.RUNNING
    assert scheduler.advance() == [(1, 1)]
    assert num_preempted(scheduler) == 0


def test_one_that_is_preempted_with_a_token_in_flight_keeps_it(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=1)
    low = scheduler.add(make_request(1, 4, 40, options=LOW))
    step = scheduler.schedule(0.0)
    scheduler.add(make_request(2, 4, 1, options=HIGH))
    ahead = scheduler.schedule(0.0)
    assert scheduler.rows_of(ahead) == [(2, 4)]
    assert (low.status, low.num_pending) == (Status.WAITING, 1)
    assert scheduler.schedule(0.0) is None, "the high one has all its tokens in flight"
    scheduler.give(step, 41)
    scheduler.give(ahead, 42)
    assert low.tokens[4:] == [41]
    assert scheduler.advance() == [(1, 5)]


# ---- at most a few times ----


def preempted_often(
    make_scheduler: MakeScheduler, make_request: MakeRequest, **limits: Any
) -> tuple[Any, Sequence]:
    """A row of 4 + 20 tokens that has given way as often as anybody must, and runs again."""
    scheduler = make_scheduler(Priority(), **limits)
    low = scheduler.add(make_request(1, 4, 20, options=LOW))
    assert scheduler.advance() == [(1, 4)]
    for time in range(MAX_PREEMPTIONS):
        scheduler.add(make_request(2 + time, 1, 1, options=HIGH))
        assert scheduler.advance() == [(2 + time, 1)]
        assert scheduler.advance() == [(1, 1 + time)]
    assert low.num_preemptions == MAX_PREEMPTIONS
    return scheduler, low


def test_it_gives_way_at_most_three_times(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """vllm#11805: no request is preempted again and again."""
    scheduler, low = preempted_often(make_scheduler, make_request, max_num_seqs=1)
    high = scheduler.add(make_request(9, 1, 1, options=HIGH))
    while not low.finish_reason:
        assert scheduler.advance() == [(1, 1)]
    assert (low.num_preemptions, high.status) == (MAX_PREEMPTIONS, Status.WAITING)
    assert scheduler.advance() == [(9, 1)]


def test_all_that_it_can_need_is_promised_to_it(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler, low = preempted_often(make_scheduler, make_request, max_num_seqs=1, num_pages=8)
    promised = []
    while not low.finish_reason:
        promised.append((len(low.pages), scheduler.rows.promised))
        scheduler.advance()
    # 24 tokens in all, six pages: it takes each out of the promise
    assert sorted(set(promised)) == [(2, 4), (3, 3), (4, 2), (5, 1), (6, 0)]
    assert scheduler.rows.promised == 0


def test_promised_pages_are_nobody_elses(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), num_pages=8, max_num_seqs=2)
    low = scheduler.add(make_request(1, 4, 20, options=LOW))
    low.num_preemptions = MAX_PREEMPTIONS
    assert scheduler.advance() == [(1, 4)]
    assert (scheduler.rows.promised, scheduler.cache.num_available) == (5, 7)
    high = scheduler.add(make_request(2, 8, 1, options=HIGH))
    assert scheduler.advance() == [(1, 1)], "two pages, and the one of its next token"
    assert high.status is Status.WAITING
    scheduler.abort("2")
    scheduler.add(make_request(3, 7, 9, options=HIGH))
    assert scheduler.advance() == [(1, 1), (3, 7)]
    # the third could grow only into what is promised to the first, and nobody can give way
    while not low.finish_reason:
        rows = scheduler.advance()
        assert (1, 1) in rows
    assert rows == [(1, 1)]
    scheduler.finish_all()


def test_an_older_row_waits_for_one_that_may_not_be_preempted_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, max_num_seqs=2)
    first = scheduler.add(make_request(1, 7, 9))
    second = scheduler.add(make_request(2, 5, 3))
    second.num_preemptions = MAX_PREEMPTIONS
    assert scheduler.advance() == [(1, 7), (2, 5)]
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert scheduler.advance() == [(2, 1)], "no page for the first, and the second stays"
    assert second.finish_reason == "length"
    assert scheduler.advance() == [(1, 1)]
    scheduler.finish_all()
    assert len(first.tokens) == 16
    assert num_preempted(scheduler) == 0

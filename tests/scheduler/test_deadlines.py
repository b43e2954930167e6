"""Deadlines with exact values: a request ends when its time is up, whatever it is doing. Field
notes 19 and 21 (LMCache#3688, vllm#2901): every state ends clean, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.policy import Priority
from scheduler.preemption import MAX_PREEMPTIONS, PreemptionCosts
from scheduler.request import Request, RequestOptions, Sequence, Status

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]
TOKEN = 7  # what the device samples


def within(seconds: float, **options: Any) -> RequestOptions:
    return RequestOptions(timeout=seconds, **options)


def assert_clean(scheduler: Any, sequence: Sequence, num_output: int) -> None:
    """It has ended with what it had, and holds nothing any more."""
    assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "timeout")
    assert (sequence.pages, sequence.slot, sequence.claims) == ([], -1, [])
    assert len(sequence.tokens) - sequence.num_prompt == num_output
    assert sequence not in list(scheduler.sequences())
    assert scheduler.abort(sequence.request.request_id) is None
    scheduler.check_invariants()


def test_the_deadline_counts_from_the_arrival(make_request: MakeRequest) -> None:
    assert make_request(1, 4, arrival=10.0, options=within(2.5)).deadline == 12.5
    assert make_request(1, 4, arrival=10.0).deadline is None


def test_it_ends_at_its_deadline_and_not_before(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 4, 20, arrival=1.0, options=within(2.0)))
    scheduler.advance()
    assert scheduler.expire(2.999) == []
    assert scheduler.expire(3.0) == [sequence]
    assert scheduler.expire(3.0) == []
    assert_clean(scheduler, sequence, num_output=1)
    assert scheduler.stats.finished["timeout"] == 1
    assert scheduler.stats.pages_held == 0
    assert scheduler.schedule(3.0) is None


def test_several_end_in_the_order_of_their_deadlines(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for number, seconds in enumerate([5.0, 3.0, 9.0, 3.0, 4.0]):
        scheduler.add(make_request(number, 4, 20, options=within(seconds)))
    scheduler.add(make_request(5, 4, 1))
    scheduler.advance()
    assert [s.order for s in scheduler.expire(5.0)] == [1, 3, 4, 0]
    scheduler.check_invariants()
    assert scheduler.advance() == [(2, 4), (5, 4)], "the two that wait have their slots at once"


def test_one_that_waits(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(1, 4, 20))
    scheduler.advance()
    head = scheduler.add(make_request(2, 60, 20, options=within(1.0)))
    behind = scheduler.add(make_request(3, 4, 1))
    assert scheduler.stats.queue_tokens == 64
    assert scheduler.expire(1.0) == [head]
    assert_clean(scheduler, head, num_output=0)
    assert scheduler.stats.queue_tokens == 4
    assert scheduler.waiting.peek() is behind


def test_the_last_one_that_waits_leaves_an_empty_queue(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(1, 4, 20))
    scheduler.advance()
    scheduler.add(make_request(2, 4, 20, options=within(1.0)))
    scheduler.expire(1.0)
    assert (len(scheduler.waiting), scheduler.stats.num_waiting) == (0, 0)
    assert scheduler.stats.queue_tokens == 0


def test_one_in_the_middle_of_its_prompt(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(prefix_cache=True, max_num_batched_tokens=6)
    sequence = scheduler.add(make_request(1, 20, 5, options=within(1.0)))
    assert scheduler.advance() == [(1, 6)]
    step = scheduler.schedule(0.5)
    assert scheduler.expire(1.0) == [sequence]
    assert_clean(scheduler, sequence, num_output=0)
    assert scheduler.give(step) == []
    scheduler.add(make_request(2, 20, 1))
    scheduler.advance()
    assert scheduler.stats.prefix_tokens["hit"] == 4, "only the page of the step that was committed"


def test_one_that_decodes(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 4, 20, options=within(1.0)))
    other = scheduler.add(make_request(2, 4, 20))
    for _ in range(5):
        scheduler.advance()
    assert scheduler.expire(1.0) == [sequence]
    assert_clean(scheduler, sequence, num_output=5)
    assert sequence.tokens[4:] == [TOKEN] * 5
    assert scheduler.advance() == [(2, 1)]
    assert other.num_output == 6


def test_tokens_in_flight_are_thrown_away(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """Two steps are on the device, and its pages are somebody else's before they are back."""
    scheduler = make_scheduler(num_pages=4, max_num_seqs=2)
    sequence = scheduler.add(make_request(1, 7, 9, options=within(1.0)))
    steps = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert sequence.num_pending == 2
    held = set(sequence.pages)
    assert scheduler.expire(1.0) == [sequence]
    assert_clean(scheduler, sequence, num_output=0)
    other = scheduler.add(make_request(2, 13, 3))
    after = scheduler.schedule(1.0)
    assert held <= set(other.pages)
    assert [scheduler.give(step) for step in steps] == [[], []]
    assert [p.sequence for p in scheduler.give(after)] == [other]
    scheduler.finish_all()
    assert len(other.tokens) == 16
    assert scheduler.stats.generation_tokens == 3


def test_one_that_was_preempted_with_a_token_in_flight(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=1)
    low = scheduler.add(make_request(1, 4, 9, options=within(1.0, priority=1)))
    step = scheduler.schedule(0.0)
    scheduler.add(make_request(2, 4, 2))
    scheduler.schedule(0.5)
    assert (low.status, low.num_pending) == (Status.WAITING, 1)
    assert scheduler.expire(1.0) == [low]
    assert_clean(scheduler, low, num_output=0)
    assert scheduler.give(step) == []
    assert scheduler.stats.queue_tokens == 0


def swapped_out(make_scheduler: MakeScheduler, make_request: MakeRequest) -> tuple[Any, Sequence]:
    """Two rows in four pages, and one of them has gone to the host."""
    scheduler = make_scheduler(num_pages=4, num_host_pages=8, costs=PreemptionCosts())
    first = scheduler.add(make_request(1, 7, 6))
    second = scheduler.add(make_request(2, 7, 6, options=within(1.0)))
    while second.num_preemptions == 0:
        scheduler.advance()
    assert first.status is Status.RUNNING
    assert scheduler.stats.preemptions == {"recompute": 0, "swap": 1}
    return scheduler, second


def test_one_that_is_swapped_out(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler, sequence = swapped_out(make_scheduler, make_request)
    assert len(sequence.claims) == 2
    assert scheduler.cache.host.num_held == 1
    assert scheduler.expire(1.0) == [sequence]
    assert_clean(scheduler, sequence, num_output=2)
    assert scheduler.cache.host.num_held == 0
    scheduler.finish_all()
    assert scheduler.cache.pool.num_held == 0


def test_one_whose_pages_are_on_their_way_back(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler, sequence = swapped_out(make_scheduler, make_request)
    scheduler.abort("1")
    step = scheduler.schedule(0.5)
    assert step.copies.back
    assert sequence.status is Status.RUNNING
    assert scheduler.expire(1.0) == [sequence]
    assert_clean(scheduler, sequence, num_output=2)
    assert scheduler.cache.pool.num_held == scheduler.cache.host.num_held == 0
    scheduler.add(make_request(3, 15, 1))
    ahead = scheduler.schedule(1.0)
    assert scheduler.give(step) == []
    assert [p.sequence.order for p in scheduler.give(ahead)] == [2]


def test_one_that_has_pages_promised(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 4, 20, options=within(1.0)))
    sequence.num_preemptions = MAX_PREEMPTIONS
    scheduler.advance()
    assert scheduler.rows.promised == 5
    scheduler.expire(1.0)
    assert_clean(scheduler, sequence, num_output=1)
    assert scheduler.rows.promised == 0


def test_after_a_failed_step_too(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler, swapped = swapped_out(make_scheduler, make_request)
    running = scheduler.add(make_request(3, 1, 9, options=within(1.0)))
    scheduler.preempt_all()
    assert scheduler.expire(1.0) == [swapped, running]
    assert_clean(scheduler, swapped, num_output=2)
    assert_clean(scheduler, running, num_output=0)
    scheduler.finish_all()


def test_what_ended_before_its_deadline_is_not_ended_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    done = scheduler.add(make_request(1, 4, 1, options=within(1.0)))
    aborted = scheduler.add(make_request(2, 4, 9, options=within(1.0)))
    scheduler.advance()
    scheduler.abort("2")
    assert scheduler.expire(1.0) == []
    assert (done.finish_reason, aborted.finish_reason) == ("length", "abort")
    assert scheduler.stats.finished["timeout"] == 0


def test_a_name_that_is_used_again_does_not_inherit_a_deadline(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 4, 9, options=within(1.0)))
    scheduler.abort("1")
    again = scheduler.add(make_request(1, 4, 9))
    assert scheduler.expire(5.0) == []
    assert again.status is Status.WAITING
    scheduler.abort("1")
    later = scheduler.add(make_request(1, 4, 9, options=within(8.0)))
    assert scheduler.expire(5.0) == []
    assert scheduler.expire(8.0) == [later]


def test_deadlines_of_requests_that_ended_are_forgotten(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """A day's deadlines at a hundred requests a second would be a leak."""
    scheduler = make_scheduler()
    stays = scheduler.add(make_request(0, 4, 9, options=within(86_400.0)))
    most = 0
    for number in range(1, 2000):
        scheduler.add(make_request(number, 4, 9, options=within(86_400.0 - number)))
        scheduler.abort(str(number))
        most = max(most, len(scheduler._deadlines))
    assert most <= 70
    assert scheduler.expire(86_399.9) == []
    assert scheduler.expire(86_400.0) == [stays]
    assert len(scheduler._deadlines) == 0


@pytest.mark.parametrize("num_output", [0, 4])
def test_the_length_model_hears_that_more_would_have_come(
    make_scheduler: MakeScheduler, make_request: MakeRequest, num_output: int
) -> None:
    heard: list[tuple[int, bool]] = []
    scheduler = make_scheduler()
    scheduler.lengths.observe = lambda request, profile, count, censored: heard.append(
        (count, censored)
    )
    scheduler.add(make_request(1, 4, 9, options=within(1.0)))
    for _ in range(num_output):
        scheduler.advance()
    scheduler.expire(1.0)
    assert heard == [(num_output, True)]

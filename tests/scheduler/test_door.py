"""Who may join the queue: limits of requests, of tokens and of the predicted wait, and what a
refused client is told. Field notes 20 and 21 (vllm PR#53936, vllm#2901): all choices of a request
or none, and no queue without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.config import SchedulerConfig
from scheduler.door import Door
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.policy import Priority
from scheduler.request import Request, RequestOptions
from scheduler.stats import Stats

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]


def make_door(*, num_waiting: int = 0, queue_tokens: int = 0, **limits: Any) -> tuple[Door, Stats]:
    config = SchedulerConfig(
        num_pages=8,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=40,
        **limits,
    )
    stats = Stats(num_waiting=num_waiting, queue_tokens=queue_tokens)
    door = Door(config, stats)
    door.is_blocked = num_waiting > 0
    return door, stats


def measure(door: Door) -> None:
    """At time 10, the queue drains by two requests and 100 tokens a second."""
    door.drain.observe(0.0, waiting=9)
    door.drain.observe(10.0, waiting=9, requests=20, tokens=1000)


def refusal(door: Door, requests: int, tokens: int, free_slots: int = 0) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        door.check_queue(requests, tokens, free_slots, 10.0)
    return caught.value


# ---- what could never run ----


def test_prompts_leave_room_for_one_token() -> None:
    """vllm#39734: a prompt of the pool's size waited for ever, and everybody behind it."""
    door, _ = make_door()
    door.check_prompt(31)
    with pytest.raises(PromptExceedsPool):
        door.check_prompt(32)
    with pytest.raises(PromptTooLong):
        door.check_prompt(40)


# ---- how many ----


def test_without_limits_nobody_is_refused() -> None:
    door, _ = make_door(num_waiting=10**6, queue_tokens=10**9)
    measure(door)
    door.check_queue(10**6, 10**9, 0, 10.0)


@pytest.mark.parametrize(
    ("num_waiting", "free_slots", "most"),
    [
        pytest.param(0, 4, 7, id="those that find a slot don't wait"),
        pytest.param(0, 0, 3, id="no slot is free"),
        pytest.param(2, 0, 1, id="two wait"),
        pytest.param(2, 4, 1, id="slots don't help while others wait for pages"),
    ],
)
def test_requests_over_the_limit(num_waiting: int, free_slots: int, most: int) -> None:
    door, stats = make_door(num_waiting=num_waiting, max_waiting=3)
    door.check_queue(most, 5, free_slots, 10.0)
    error = refusal(door, most + 1, 5, free_slots)
    assert error.limit == "requests"
    assert error.message == "The waiting queue is full: 3 requests. Retry later."
    assert (error.status, error.code) == (429, "queue_full")
    assert stats.requests_refused == {"requests": 1, "tokens": 0, "wait": 0}


def test_a_burst_finds_all_slots_before_the_first_of_it_has_started(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """Who was added since the last round of scheduling does not wait for anything yet."""
    scheduler = make_scheduler(max_waiting=1, max_num_seqs=4)
    for number in range(5):
        scheduler.check_queue(1, 4, 0.0)
        scheduler.add(make_request(number, 4, 3))
    with pytest.raises(QueueFull):
        scheduler.check_queue(1, 4, 0.0)
    scheduler.advance()
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (4, 1)
    with pytest.raises(QueueFull):
        scheduler.check_queue(1, 4, 0.0)


def test_slots_that_are_free_for_want_of_pages_let_nobody_in(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_waiting=2, max_num_seqs=4, num_pages=8)
    for number in (1, 2):
        scheduler.add(make_request(number, 16, 9))
    scheduler.advance()
    assert (scheduler.slots.num_free, scheduler.stats.num_waiting) == (3, 1)
    scheduler.check_queue(1, 4, 0.0)
    with pytest.raises(QueueFull):
        scheduler.check_queue(2, 8, 0.0)
    scheduler.abort("2")
    scheduler.check_queue(5, 20, 0.0)


def test_choices_are_taken_all_or_none(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """vllm PR#53936: a queue of four took half of a request with eight choices."""
    scheduler = make_scheduler(max_waiting=4, max_num_seqs=1)
    scheduler.add(make_request(1, 4, 9))
    scheduler.advance()
    with pytest.raises(QueueFull):
        scheduler.check_queue(8, 8, 0.0)
    scheduler.check_queue(4, 4, 0.0)
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (1, 0)


def test_tokens_over_the_limit() -> None:
    door, stats = make_door(num_waiting=2, queue_tokens=60, max_waiting_tokens=100)
    door.check_queue(1, 40, 0, 10.0)
    error = refusal(door, 1, 41)
    assert error.limit == "tokens"
    assert "100 prompt tokens" in error.message
    assert stats.requests_refused == {"requests": 0, "tokens": 1, "wait": 0}


def test_who_finds_a_slot_may_have_any_prompt() -> None:
    door, _ = make_door(max_waiting_tokens=10)
    door.check_queue(2, 60, 2, 10.0)
    assert refusal(door, 3, 60, 2).limit == "tokens"


def test_the_tokens_of_a_preempted_one_count_with_its_output(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(Priority(), max_num_seqs=1, max_waiting_tokens=10)
    scheduler.add(make_request(1, 4, 9))
    scheduler.advance()
    scheduler.advance()
    scheduler.add(make_request(2, 1, 9, options=RequestOptions(priority=-1)))
    scheduler.advance()
    assert scheduler.stats.queue_tokens == 6
    scheduler.check_queue(1, 4, 0.0)
    with pytest.raises(QueueFull):
        scheduler.check_queue(1, 5, 0.0)


# ---- how long ----


def test_the_wait_is_predicted_from_the_measured_rate() -> None:
    door, stats = make_door(num_waiting=15, queue_tokens=100, max_queue_wait=8.0)
    measure(door)
    door.check_queue(
        1, 1, 0, 10.0
    )  # its 16th starts at 2 a second, and as long as it has been known
    stats.num_waiting = 26
    error = refusal(door, 1, 1)
    assert error.limit == "wait"
    assert error.retry_after == pytest.approx(5.0, abs=0.6)
    assert "is over 8 s" in error.message
    assert stats.requests_refused == {"requests": 0, "tokens": 0, "wait": 1}


def test_long_prompts_in_the_queue_count_by_their_tokens() -> None:
    door, _ = make_door(num_waiting=2, queue_tokens=2000, max_queue_wait=8.0)
    measure(door)
    assert refusal(door, 1, 1).retry_after == pytest.approx(12.0, abs=0.6)


def test_before_any_measurement_nothing_is_predicted() -> None:
    door, _ = make_door(num_waiting=1000, queue_tokens=10**6, max_queue_wait=0.1)
    door.check_queue(1, 1, 0, 10.0)


def test_who_finds_a_slot_does_not_wait() -> None:
    door, _ = make_door(max_queue_wait=0.0)
    measure(door)
    door.check_queue(4, 400, 4, 10.0)


def test_those_on_their_way_to_the_queue_are_ahead_as_well() -> None:
    """A burst within one step: none of it is in the queue yet when the last one asks."""
    door, _ = make_door(max_queue_wait=8.0)
    measure(door)
    door.check_queue(10, 100, 0, 10.0)
    assert refusal(door, 100, 100).limit == "wait"
    assert refusal(door, 10, 3000).limit == "wait"


# ---- when to come back ----


def test_until_there_is_room_for_these_requests() -> None:
    door, _ = make_door(num_waiting=9, max_waiting=10)
    measure(door)
    assert refusal(door, 7, 1).retry_after == pytest.approx(3.0)  # six must start first
    assert refusal(door, 10, 1).retry_after == pytest.approx(4.5)


def test_until_there_is_room_for_these_tokens() -> None:
    door, _ = make_door(num_waiting=1, queue_tokens=900, max_waiting_tokens=1000)
    measure(door)
    assert refusal(door, 1, 500).retry_after == pytest.approx(4.0)


def test_at_least_a_second() -> None:
    door, _ = make_door(num_waiting=10, max_waiting=10)
    assert refusal(door, 1, 1).retry_after == 1.0, "nothing is known yet"
    measure(door)
    assert refusal(door, 1, 1).retry_after == 1.0, "half a second"


def test_a_row_that_only_changes_places_drains_nothing(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """An important request starts in place of another one: the queue is as long as before."""
    scheduler = make_scheduler(Priority(), max_num_seqs=1, max_waiting=1)
    scheduler.add(make_request(1, 4, 1))
    for number in (2, 3):
        scheduler.add(make_request(number, 4, 9))
    scheduler.give(scheduler.schedule(0.0))
    scheduler.give(scheduler.schedule(10.0))  # the second starts: one in ten seconds
    with pytest.raises(QueueFull) as caught:
        scheduler.check_queue(1, 4, 10.0)
    assert caught.value.retry_after == pytest.approx(10.0)
    scheduler.add(make_request(4, 4, 9, options=RequestOptions(priority=-1)))
    step = scheduler.schedule(20.0)
    assert scheduler.rows_of(step) == [(4, 4)]
    scheduler.give(step)
    scheduler.abort("3")
    with pytest.raises(QueueFull) as caught:
        scheduler.check_queue(1, 4, 20.0)
    assert caught.value.retry_after == pytest.approx(20.0)


# ---- gauges ----


def test_nothing_is_set_aside_when_nobody_runs(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """vllm#31503, vllm#22545: gauges that kept their last value in an idle engine."""
    scheduler = make_scheduler(num_pages=8)
    scheduler.add(make_request(1, 4, 20))
    scheduler.advance()
    assert scheduler.stats.pages_reserved > 0
    scheduler.finish_all()
    stats = scheduler.stats
    assert stats.pages_reserved == 0
    assert (stats.num_running, stats.num_waiting, stats.queue_tokens, stats.pages_held) == (0,) * 4


def test_aborts_leave_no_gauge_behind(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """vllm#29928: a mass abort, and then nothing more is scheduled."""
    scheduler = make_scheduler(num_pages=8, max_num_seqs=2)
    for number in range(6):
        scheduler.add(make_request(number, 4, 20))
    scheduler.advance()
    for number in range(6):
        scheduler.abort(str(number))
    assert scheduler.schedule(1.0) is None
    stats = scheduler.stats
    assert stats.pages_reserved == 0
    assert (stats.num_running, stats.num_waiting, stats.queue_tokens, stats.pages_held) == (0,) * 4
    assert sum(stats.finished.values()) == stats.finished["abort"] == 6

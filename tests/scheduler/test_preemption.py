"""Scheduler with exact values: preemption, steps made ahead, steps that fail."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.plan import plan_layout
from scheduler.policy import Fcfs, KeyedQueue, WaitingQueue
from scheduler.request import Request, Status

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]
TOKEN = 7  # what the device samples, unless a test says otherwise


# ---- preemption ----


def three_rows_in_six_pages(
    make_scheduler: MakeScheduler, make_request: MakeRequest, **params: Any
) -> Any:
    """Each has computed 7 tokens of its 8 and fills 2 pages with the next one."""
    scheduler = make_scheduler(num_pages=6, page_size=4, max_num_batched_tokens=24)
    for number in (1, 2, 3):
        scheduler.add(make_request(number, 7, 5, **params))
    assert scheduler.advance() == [(1, 7), (2, 7), (3, 7)]
    assert scheduler.cache.pool.num_free == 0
    return scheduler


def test_the_youngest_row_makes_room(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = three_rows_in_six_pages(make_scheduler, make_request)
    third = scheduler.running[-1]
    assert scheduler.advance() == [(1, 1), (2, 1), (3, 1)]
    # 1 and 2 need a third page each: exactly the two that 3 holds
    assert scheduler.advance() == [(1, 1), (2, 1)]
    assert (third.status, third.num_computed, third.pages, third.slot) == (
        Status.WAITING,
        0,
        [],
        -1,
    )
    assert third.num_preemptions == 1
    assert len(third.tokens) == 9, "what it has said stays"
    assert scheduler.stats.preemptions == {"recompute": 1, "swap": 0}
    assert scheduler.cache.pool.num_free == 0


def test_a_preempted_row_keeps_its_place_and_computes_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = three_rows_in_six_pages(make_scheduler, make_request)
    third = scheduler.running[-1]
    scheduler.add(make_request(4, 1, 2))
    assert scheduler.advance() == [(1, 1), (2, 1), (3, 1)]
    assert [scheduler.advance() for _ in range(3)] == [[(1, 1), (2, 1)]] * 3
    assert not scheduler.running
    # the two that ended are gone: the third comes back whole, before the fourth
    assert scheduler.advance() == [(3, 9), (4, 1)]
    scheduler.finish_all()
    assert third.tokens == [*range(100, 107), *[TOKEN] * 5]
    assert third.finish_reason == "length"
    assert scheduler.stats.finished == {
        "stop": 0,
        "length": 4,
        "abort": 0,
        "error": 0,
        "timeout": 0,
    }
    assert scheduler.stats.prompt_tokens == 22, "a prompt counts once"
    assert scheduler.stats.generation_tokens == 17


def test_a_row_preempted_with_a_token_in_flight_gets_that_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = three_rows_in_six_pages(make_scheduler, make_request)
    third = scheduler.running[-1]
    first_step, ahead = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert scheduler.rows_of(first_step) == [(1, 1), (2, 1), (3, 1)]
    assert scheduler.rows_of(ahead) == [(1, 1), (2, 1)]
    assert (third.status, third.num_pending, third.num_tokens) == (Status.WAITING, 1, 9)
    assert [p.sequence.order for p in scheduler.give(first_step, 41)] == [0, 1, 2]
    assert (third.num_pending, third.tokens[7:]) == (0, [TOKEN, 41])
    assert [p.sequence.order for p in scheduler.give(ahead, 42)] == [0, 1]
    scheduler.abort("1")
    scheduler.abort("2")
    step = scheduler.schedule(0.0)
    assert scheduler.rows_of(step) == [(3, 9)]
    ids = plan_layout(step.plan.key).views(step.plan.buffer)["token_ids"]
    assert ids[:9].tolist() == [*range(100, 107), TOKEN, 41]


def test_a_preempted_row_whose_last_token_was_in_flight_ends_in_the_queue(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = three_rows_in_six_pages(make_scheduler, make_request, stop_ids=frozenset({41}))
    third = scheduler.running[-1]
    first_step, _ = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert third.status is Status.WAITING
    scheduler.give(first_step, 41)
    assert (third.status, third.finish_reason) == (Status.FINISHED, "stop")
    assert len(scheduler.waiting) == 0
    assert scheduler.stats.num_waiting == 0


def test_the_youngest_is_the_victim_whoever_was_let_in_first(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    class ShortestFirst(Fcfs):
        def queue(self) -> WaitingQueue:
            return KeyedQueue(lambda sequence: len(sequence.tokens))

    scheduler = make_scheduler(ShortestFirst(), num_pages=4, page_size=4, max_num_batched_tokens=6)
    scheduler.add(make_request(1, 7, 5))
    scheduler.add(make_request(2, 6, 5))
    assert scheduler.advance() == [(2, 6)]
    assert scheduler.advance() == [(2, 1), (1, 5)]
    assert [s.order for s in scheduler.running] == [0, 1]
    assert scheduler.advance() == [(2, 1), (1, 2)]
    # no page is left: the second, at a page's end, waits; then the first needs one too
    assert scheduler.advance() == [(1, 1)]
    assert [s.order for s in scheduler.running] == [0, 1]
    assert scheduler.advance() == [(1, 1)]
    assert [s.order for s in scheduler.running] == [0]
    scheduler.finish_all()


def test_an_older_chunk_takes_the_pages_of_a_row_that_was_to_decode(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """1 is still in its prompt when 2, younger, has eaten the pages that 1 had left."""
    scheduler = make_scheduler(
        num_pages=5, page_size=2, max_num_batched_tokens=4, max_chunk_tokens=1
    )
    scheduler.add(make_request(1, 7, 2))
    second = scheduler.add(make_request(2, 1, 9))
    steps = []
    while second.num_preemptions == 0:
        steps.append(scheduler.advance())
    assert steps[-1] == [(1, 1)]
    assert steps[:-1] == [[(1, 1), (2, 1)]] + [[(2, 1), (1, 1)]] * (len(steps) - 2)
    scheduler.finish_all()
    assert len(second.tokens) == 10


def test_an_output_that_outgrows_the_pool_ends_with_length(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=3, page_size=4, max_model_len=1000)
    limit = scheduler.max_output(5, 500)
    assert limit == 7
    sequence = scheduler.add(make_request(1, 5, limit))
    other = scheduler.add(make_request(2, 2, 2))
    scheduler.finish_all()
    assert (sequence.finish_reason, len(sequence.tokens)) == ("length", 12)
    assert (other.finish_reason, len(other.tokens)) == ("length", 4)
    assert scheduler.cache.pool.num_free == 3


@pytest.mark.parametrize("page_size", [1, 3, 32])
def test_two_that_fill_the_pool_alone_end_one_after_the_other(
    make_scheduler: MakeScheduler, make_request: MakeRequest, page_size: int
) -> None:
    scheduler = make_scheduler(num_pages=96 // page_size, page_size=page_size, max_model_len=96)
    sequences = [scheduler.add(make_request(n, 10, 86)) for n in range(3)]
    scheduler.finish_all()
    assert [len(s.tokens) for s in sequences] == [96] * 3
    assert sequences[0].num_preemptions == 0


def test_after_a_failed_step_every_row_starts_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    first, second = (scheduler.add(make_request(n, 3, 4)) for n in (1, 2))
    scheduler.advance()
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    assert (first.num_pending, second.num_pending) == (2, 2)
    assert scheduler.preempt_all() == [first, second]
    scheduler.check_invariants()
    assert (first.num_pending, second.num_pending) == (0, 0)
    assert scheduler.cache.pool.num_held == 0
    assert scheduler.advance() == [(1, 4), (2, 4)]
    scheduler.finish_all()
    assert len(first.tokens) == len(second.tokens) == 7


# ---- lookahead ----


def test_a_plan_made_ahead_names_the_slot_instead_of_the_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(1, [9]))
    sequence = scheduler.add(make_request(2, [8]))
    first, ahead = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None
    assert ahead is not None
    ids = [plan_layout(s.plan.key).views(s.plan.buffer)["token_ids"][:2] for s in (first, ahead)]
    assert [i.tolist() for i in ids] == [[9, 8], [-1, -2]]
    assert sequence.num_pending == 2
    assert [(p.row, p.token) for p in scheduler.give(first, 31)] == [(0, 31), (1, 31)]
    assert [(p.row, p.token) for p in scheduler.give(ahead, 32)] == [(0, 32), (1, 32)]
    assert sequence.tokens == [8, 31, 32]


def test_nothing_is_planned_past_max_tokens(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 3, 2))
    steps = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert scheduler.schedule(0.0) is None
    for step in steps:
        scheduler.give(step)
    assert sequence.finish_reason == "length"
    assert scheduler.schedule(0.0) is None


def test_the_row_of_a_sequence_that_ended_is_thrown_away(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 3, 8, stop_ids=frozenset({TOKEN})))
    other = scheduler.add(make_request(2, 3, 8))
    first, ahead = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.give(first)
    assert sequence.finish_reason == "stop"
    # its slot and its pages are somebody else's before its last row comes back
    third = scheduler.add(make_request(3, 3, 8))
    after = scheduler.schedule(0.0)
    assert scheduler.rows_of(after) == [(2, 1), (3, 3)]
    assert [p.sequence for p in scheduler.give(ahead)] == [other]
    assert [p.sequence for p in scheduler.give(after)] == [other, third]
    assert len(sequence.tokens) == 4
    assert scheduler.stats.generation_tokens == 5


def test_a_failed_commit_changes_nothing(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    first, second = (scheduler.add(make_request(n, 3, 1)) for n in (1, 2))
    step = scheduler.schedule(0.0)
    assert step is not None
    with pytest.raises(AssertionError, match="gave no token"):
        scheduler.commit(step, SimpleNamespace(tokens=np.array([5, -1, 0, 0], np.int32)), 0.0)
    scheduler.check_invariants()
    assert (len(first.tokens), len(second.tokens)) == (3, 3)
    assert (first.num_pending, second.num_pending) == (1, 1)
    assert scheduler.preempt_all() == [first, second]
    scheduler.finish_all()
    assert (first.finish_reason, second.finish_reason) == ("length", "length")

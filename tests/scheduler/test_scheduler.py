"""Scheduler with exact values. What holds for any sequence of calls is in test_scheduler_machine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from scheduler.core import Progress, Scheduler, Step
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.plan import plan_layout
from scheduler.request import MAX_SUPPRESSED, Request, Sequence, Status

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., Request]
TOKEN = 7  # what the device samples, unless a test says otherwise


def rows(step: Step | None) -> list[tuple[int, int]]:
    """(request number, tokens) of each row."""
    assert step is not None
    view = plan_layout(step.plan.key).views(step.plan.buffer)
    count = step.plan.num_rows
    numbers, lengths = view["key"][:count, 0].tolist(), view["query_len"][:count].tolist()
    return list(zip(numbers, lengths, strict=True))


def commit(
    scheduler: Scheduler, step: Step | None, token: int = TOKEN, now: float = 0.0
) -> list[Progress]:
    assert step is not None
    tokens = np.full(step.plan.key.rows, token, np.int32)
    progress = scheduler.commit(step, SimpleNamespace(tokens=tokens), now)
    scheduler.check_invariants()
    return progress


def advance(scheduler: Scheduler, token: int = TOKEN) -> list[tuple[int, int]]:
    """One step without lookahead."""
    step = scheduler.schedule(0.0)
    scheduler.check_invariants()
    commit(scheduler, step, token)
    return rows(step)


def finish_all(scheduler: Scheduler, limit: int = 1000) -> int:
    for count in range(limit):
        if not scheduler.has_requests:
            return count
        advance(scheduler)
    raise AssertionError("not everything ended")


# ---- at the door ----


def test_prompts_that_can_never_run_are_refused(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_pages=10, page_size=4, max_model_len=50)
    scheduler.check(39)
    with pytest.raises(PromptExceedsPool, match="40 tokens"):
        scheduler.check(40)
    with pytest.raises(PromptExceedsPool):
        scheduler.check(49)
    with pytest.raises(PromptTooLong, match="50 tokens"):
        scheduler.check(50)
    assert not scheduler.has_requests


def test_the_context_is_named_first(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_pages=100, page_size=4, max_model_len=50)
    scheduler.check(49)
    with pytest.raises(PromptTooLong, match="maximum context length is 50 tokens"):
        scheduler.check(50)


@pytest.mark.parametrize(
    ("prompt", "asked", "given"), [(10, 5, 5), (10, 30, 30), (10, 31, 30), (10, None, 30), (39, None, 1)]
)
def test_max_tokens_is_clamped_to_the_pool(
    make_scheduler: MakeScheduler, prompt: int, asked: int | None, given: int
) -> None:
    scheduler = make_scheduler(num_pages=10, page_size=4, max_model_len=100)
    assert scheduler.max_output(prompt, asked) == given


def test_max_tokens_is_clamped_to_the_context(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_pages=100, page_size=4, max_model_len=50)
    assert scheduler.max_output(10, 10**9) == 40


def test_a_full_queue_takes_all_choices_or_none(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_waiting=4)
    scheduler.check(1, num_requests=4)
    with pytest.raises(QueueFull, match="4 requests"):
        scheduler.check(1, num_requests=5)
    for number in range(3):
        scheduler.add(make_request(number, 2))
    scheduler.check(1)
    with pytest.raises(QueueFull):
        scheduler.check(1, num_requests=2)
    advance(scheduler)
    scheduler.check(1, num_requests=4)


def test_add_trusts_nobody(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_pages=10, page_size=4)
    scheduler.add(make_request(1, 2))
    ends = frozenset(range(MAX_SUPPRESSED + 1))
    for bad in (
        make_request(1, 2),
        make_request(2, 0),
        make_request(3, 39, 2),
        make_request(4, 2, 0),
        make_request(5, 2, min_tokens=1, stop_ids=ends),
    ):
        with pytest.raises(AssertionError):
            scheduler.add(bad)
    scheduler.add(make_request(6, 2, stop_ids=ends))
    assert [s.request.request_id for s in scheduler.sequences()] == ["1", "6"]
    scheduler.check_invariants()


# ---- chunks ----


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_num_batched_tokens": 16}, [10, 1, 1]),
        ({"max_num_batched_tokens": 10}, [10, 1, 1]),
        ({"max_num_batched_tokens": 4}, [4, 4, 2, 1, 1]),
        ({"max_num_batched_tokens": 3}, [3, 3, 3, 1, 1, 1]),
        ({"max_num_batched_tokens": 16, "max_chunk_tokens": 4}, [4, 4, 2, 1, 1]),
        ({"max_num_batched_tokens": 3, "max_chunk_tokens": 4}, [3, 3, 3, 1, 1, 1]),
        ({"max_num_batched_tokens": 1}, [1] * 12),
    ],
)
def test_tokens_of_each_step(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    limits: dict[str, int],
    steps: list[int],
) -> None:
    scheduler = make_scheduler(max_num_seqs=1, **limits)
    sequence = scheduler.add(make_request(1, 10, 3))
    assert [advance(scheduler) for _ in steps] == [[(1, length)] for length in steps]
    assert sequence.finish_reason == "length"
    assert scheduler.stats.plan_tokens["real"] == 12


def test_pages_come_one_by_one_as_tokens_appear(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=6)
    sequence = scheduler.add(make_request(1, 7, 6))
    held = []
    while scheduler.has_requests:
        step = scheduler.schedule(0.0)
        held.append((sequence.num_computed, len(sequence.pages)))
        commit(scheduler, step)
    assert held == [(6, 2), (7, 2), (8, 2), (9, 3), (10, 3), (11, 3), (12, 3)]
    assert scheduler.pool.num_held == 0


def test_rows_that_decode_come_first_then_chunks_by_age(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    scheduler.add(make_request(1, 12))
    scheduler.add(make_request(2, 3))
    scheduler.add(make_request(3, 12))
    assert advance(scheduler) == [(1, 10)]
    assert advance(scheduler) == [(1, 2), (2, 3), (3, 5)]
    scheduler.add(make_request(4, 4))
    assert advance(scheduler) == [(1, 1), (2, 1), (3, 7), (4, 1)]
    assert advance(scheduler) == [(1, 1), (2, 1), (3, 1), (4, 3)]
    assert advance(scheduler) == [(1, 1), (2, 1), (3, 1), (4, 1)]


def test_kinds_of_plans(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40, max_num_seqs=4)
    for number, length in ((1, 1), (2, 20), (3, 5)):
        scheduler.add(make_request(number, length))
    first = scheduler.schedule(0.0)
    assert first is not None
    assert str(first.plan.key) == "mixed[tokens=32,rows=4,pages=8]"
    commit(scheduler, first)
    second = scheduler.schedule(0.0)
    assert second is not None
    assert str(second.plan.key) == "decode[tokens=4,rows=4,pages=8]"
    assert (second.plan.num_tokens, second.plan.num_rows) == (3, 3)
    assert scheduler.stats.plan_tokens == {"real": 26 + 3, "padded": 6 + 1}


def test_a_long_prompt_does_not_starve_those_that_decode(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """Every step of the prompt carries every decoding row, and the prompt goes on in each."""
    scheduler = make_scheduler(num_pages=400, max_model_len=1000, max_num_batched_tokens=8)
    for number in (1, 2, 3):
        scheduler.add(make_request(number, 1, 300))
    advance(scheduler)
    long = scheduler.add(make_request(4, 500, 2))
    steps = [advance(scheduler) for _ in range(100)]
    assert steps == [[(1, 1), (2, 1), (3, 1), (4, 5)]] * 100
    assert long.num_computed == 500
    assert len(long.tokens) == 501


def test_no_more_rows_than_the_budget_can_advance(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=3)
    for number in range(5):
        scheduler.add(make_request(number, 1, 4))
    assert advance(scheduler) == [(0, 1), (1, 1), (2, 1)]
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (3, 2)
    assert advance(scheduler) == [(0, 1), (1, 1), (2, 1)]


def test_admission_leaves_the_pages_that_running_rows_still_need(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """The first prompt holds 2 pages of the 5 that it needs; 4 are free, 3 of them spoken for."""
    scheduler = make_scheduler(num_pages=6, page_size=4, max_num_batched_tokens=16, max_chunk_tokens=8)
    scheduler.add(make_request(1, 20, 2))
    scheduler.add(make_request(2, 5, 2))
    assert advance(scheduler) == [(1, 8)]
    assert scheduler.pool.num_free == 4
    assert advance(scheduler) == [(1, 8)]
    assert advance(scheduler) == [(1, 4)]
    assert advance(scheduler) == [(1, 1)]
    assert advance(scheduler) == [(2, 5)]
    assert scheduler.stats.preemptions["recompute"] == 0


def test_nobody_overtakes_the_head_of_the_queue(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, page_size=4)
    scheduler.add(make_request(1, 5, 2))
    scheduler.add(make_request(2, 12, 2))
    scheduler.add(make_request(3, 1, 2))
    assert advance(scheduler) == [(1, 5)]
    assert advance(scheduler) == [(1, 1)]
    assert advance(scheduler) == [(2, 12)]


# ---- preemption ----


def three_rows_in_six_pages(make_scheduler: MakeScheduler, make_request: MakeRequest) -> Scheduler:
    scheduler = make_scheduler(num_pages=6, page_size=4, max_num_batched_tokens=24)
    for number in (1, 2, 3):
        scheduler.add(make_request(number, 7, 5))
    assert advance(scheduler) == [(1, 7), (2, 7), (3, 7)]
    assert advance(scheduler) == [(1, 1), (2, 1), (3, 1)]
    assert scheduler.pool.num_free == 0
    return scheduler


def test_the_youngest_row_makes_room(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = three_rows_in_six_pages(make_scheduler, make_request)
    third = scheduler.running[-1]
    # 1 and 2 need a third page each: exactly the two that 3 holds
    assert advance(scheduler) == [(1, 1), (2, 1)]
    assert (third.status, third.num_computed, third.pages, third.slot) == (Status.WAITING, 0, [], -1)
    assert third.num_preemptions == 1
    assert len(third.tokens) == 9, "what it has said stays"
    assert scheduler.stats.preemptions == {"recompute": 1}
    assert scheduler.pool.num_free == 0


def test_a_preempted_row_keeps_its_place_and_computes_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = three_rows_in_six_pages(make_scheduler, make_request)
    third = scheduler.running[-1]
    scheduler.add(make_request(4, 1, 2))
    assert [advance(scheduler) for _ in range(3)] == [[(1, 1), (2, 1)]] * 3
    assert not scheduler.running
    # the two that ended are gone: the third comes back whole, before the fourth
    assert advance(scheduler) == [(3, 9), (4, 1)]
    finish_all(scheduler)
    assert third.tokens == [*range(100, 107), *[TOKEN] * 5]
    assert third.finish_reason == "length"
    assert scheduler.stats.finished == {"stop": 0, "length": 4, "abort": 0, "error": 0}
    assert scheduler.stats.prompt_tokens == 22, "a prompt counts once"
    assert scheduler.stats.generation_tokens == 17


def test_a_row_preempted_with_a_token_in_flight_gets_that_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, page_size=4, max_num_batched_tokens=24)
    scheduler.add(make_request(1, 8, 8))
    second = scheduler.add(make_request(2, 7, 8))
    first_step = scheduler.schedule(0.0)
    assert rows(first_step) == [(1, 8), (2, 7)]
    ahead = scheduler.schedule(0.0)
    assert rows(ahead) == [(1, 1)]
    assert (second.status, second.num_pending, second.num_tokens) == (Status.WAITING, 1, 8)
    assert [p.sequence.request.request_id for p in commit(scheduler, first_step, 41)] == ["1", "2"]
    assert (second.num_pending, second.tokens[7:]) == (0, [41])
    assert [p.sequence.request.request_id for p in commit(scheduler, ahead, 42)] == ["1"]
    scheduler.abort("1")
    step = scheduler.schedule(0.0)
    assert rows(step) == [(2, 8)]
    assert step is not None
    ids = plan_layout(step.plan.key).views(step.plan.buffer)["token_ids"]
    assert ids[:8].tolist() == [*range(100, 107), 41]


def test_a_preempted_row_whose_last_token_was_in_flight_ends_in_the_queue(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, page_size=4, max_num_batched_tokens=24)
    scheduler.add(make_request(1, 8, 8))
    second = scheduler.add(make_request(2, 7, 8, stop_ids=frozenset({TOKEN})))
    first_step = scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    assert second.status is Status.WAITING
    commit(scheduler, first_step)
    assert (second.status, second.finish_reason) == (Status.FINISHED, "stop")
    assert len(scheduler.waiting) == 0
    assert scheduler.stats.num_waiting == 0


def test_an_older_chunk_takes_the_pages_of_a_row_that_was_to_decode(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """1 is still in its prompt when 2, younger, has eaten the pages that 1 had left."""
    scheduler = make_scheduler(num_pages=6, page_size=2, max_num_batched_tokens=4, max_chunk_tokens=1)
    scheduler.add(make_request(1, 7, 2))
    second = scheduler.add(make_request(2, 1, 10))
    steps = []
    while second.num_preemptions == 0:
        steps.append(advance(scheduler))
    assert steps[-1] == [(1, 1)]
    assert steps[:-1] == [[(1, 1), (2, 1)]] + [[(2, 1), (1, 1)]] * (len(steps) - 2)
    finish_all(scheduler)
    assert len(second.tokens) == 11


def test_an_output_that_outgrows_the_pool_ends_with_length(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=3, page_size=4, max_model_len=1000)
    limit = scheduler.max_output(5, 500)
    assert limit == 7
    sequence = scheduler.add(make_request(1, 5, limit))
    other = scheduler.add(make_request(2, 2, 2))
    finish_all(scheduler)
    assert (sequence.finish_reason, len(sequence.tokens)) == ("length", 12)
    assert (other.finish_reason, len(other.tokens)) == ("length", 4)
    assert scheduler.pool.num_free == 3


@pytest.mark.parametrize("page_size", [1, 3, 32])
def test_two_that_fill_the_pool_alone_end_one_after_the_other(
    make_scheduler: MakeScheduler, make_request: MakeRequest, page_size: int
) -> None:
    scheduler = make_scheduler(num_pages=96 // page_size, page_size=page_size, max_model_len=96)
    sequences = [scheduler.add(make_request(n, 10, 86)) for n in range(3)]
    finish_all(scheduler)
    assert [len(s.tokens) for s in sequences] == [96] * 3
    assert sequences[0].num_preemptions == 0


def test_after_a_failed_step_every_row_starts_again(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    first, second = (scheduler.add(make_request(n, 3, 4)) for n in (1, 2))
    advance(scheduler)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    assert (first.num_pending, second.num_pending) == (2, 2)
    assert scheduler.preempt_all() == [first, second]
    scheduler.check_invariants()
    assert (first.num_pending, second.num_pending) == (0, 0)
    assert scheduler.pool.num_held == 0
    assert advance(scheduler) == [(1, 4), (2, 4)]
    finish_all(scheduler)
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
    assert [(p.row, p.token) for p in commit(scheduler, first, 31)] == [(0, 31), (1, 31)]
    assert [(p.row, p.token) for p in commit(scheduler, ahead, 32)] == [(0, 32), (1, 32)]
    assert sequence.tokens == [8, 31, 32]


def test_nothing_is_planned_past_max_tokens(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 3, 2))
    steps = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    assert scheduler.schedule(0.0) is None
    for step in steps:
        commit(scheduler, step)
    assert sequence.finish_reason == "length"
    assert scheduler.schedule(0.0) is None


def test_the_row_of_a_sequence_that_ended_is_thrown_away(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 3, 8, stop_ids=frozenset({TOKEN})))
    other = scheduler.add(make_request(2, 3, 8))
    first, ahead = scheduler.schedule(0.0), scheduler.schedule(0.0)
    commit(scheduler, first)
    assert sequence.finish_reason == "stop"
    # its slot and its pages are somebody else's before its last row comes back
    third = scheduler.add(make_request(3, 3, 8))
    after = scheduler.schedule(0.0)
    assert rows(after) == [(2, 1), (3, 3)]
    assert [p.sequence for p in commit(scheduler, ahead)] == [other]
    assert [p.sequence for p in commit(scheduler, after)] == [other, third]
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
    finish_all(scheduler)
    assert (first.finish_reason, second.finish_reason) == ("length", "length")


# ---- ends ----


def waiting(scheduler: Scheduler, add: Callable[[], Sequence]) -> Sequence:
    sequence = add()
    assert sequence.status is Status.WAITING
    return sequence


def in_its_prompt(scheduler: Scheduler, add: Callable[[], Sequence]) -> Sequence:
    sequence = add()
    assert advance(scheduler)[-1] == (9, 3)
    return sequence


def decoding(scheduler: Scheduler, add: Callable[[], Sequence]) -> Sequence:
    sequence = add()
    for _ in range(4):
        advance(scheduler)
    assert len(sequence.tokens) > sequence.num_prompt
    return sequence


def in_flight(scheduler: Scheduler, add: Callable[[], Sequence]) -> Sequence:
    sequence = decoding(scheduler, add)
    scheduler.schedule(0.0)
    assert sequence.num_pending == 1
    return sequence


def preempted(scheduler: Scheduler, add: Callable[[], Sequence]) -> Sequence:
    sequence = in_flight(scheduler, add)
    scheduler._preempt(sequence)
    assert (sequence.status, sequence.num_pending) == (Status.WAITING, 1)
    return sequence


@pytest.mark.parametrize("state", [waiting, in_its_prompt, decoding, in_flight, preempted])
def test_abort_frees_pages_at_once(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    state: Callable[[Scheduler, Callable[[], Sequence]], Sequence],
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    other = scheduler.add(make_request(1, 1, 30))
    advance(scheduler)
    sequence = state(scheduler, lambda: scheduler.add(make_request(9, 7, 20)))
    assert scheduler.abort("9") is sequence
    scheduler.check_invariants()
    assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")
    assert scheduler.pool.num_held == len(other.pages)
    assert scheduler.stats.pages_held == len(other.pages)
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (1, 0)
    assert scheduler.stats.finished["abort"] == 1
    assert scheduler.abort("9") is None
    assert scheduler.stats.finished["abort"] == 1
    # the name is free again
    assert scheduler.add(make_request(9, 2, 1)) is not sequence


def test_aborting_who_is_not_here(make_scheduler: MakeScheduler) -> None:
    assert make_scheduler().abort("nobody") is None


def test_mass_abort_leaves_no_trace(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    for number in range(100):
        scheduler.add(make_request(number, 5))
    step = scheduler.schedule(0.0)
    for number in range(100):
        scheduler.abort(str(number))
    assert commit(scheduler, step) == []
    stats = scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0)
    assert (stats.finished["abort"], stats.generation_tokens) == (100, 0)
    assert scheduler.schedule(0.0) is None


@pytest.mark.parametrize(
    ("stop_ids", "min_tokens", "count", "reason"),
    [
        ({TOKEN}, 0, 1, "stop"),
        ({TOKEN}, 1, 2, "stop"),
        ({TOKEN}, 4, 5, "stop"),
        ({TOKEN}, 5, 6, "stop"),
        ({TOKEN}, 6, 6, "length"),
        ({3, TOKEN, 5}, 0, 1, "stop"),
        ({TOKEN + 1}, 0, 6, "length"),
        (set(), 0, 6, "length"),
    ],
)
def test_stop_ids(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    stop_ids: set[int],
    min_tokens: int,
    count: int,
    reason: str,
) -> None:
    """Any id of the set ends it, after min_tokens others; ignored end ids are not in the set. Below
    min_tokens the device would not have sampled one (the suppressed lane)."""
    scheduler = make_scheduler()
    request = make_request(1, 3, 6, stop_ids=frozenset(stop_ids), min_tokens=min_tokens)
    sequence = scheduler.add(request)
    finish_all(scheduler)
    assert len(sequence.tokens) - sequence.num_prompt == count
    assert sequence.finish_reason == reason
    assert scheduler.stats.finished[reason] == 1


def test_an_end_token_at_the_limit_is_a_stop(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 3, 1, stop_ids=frozenset({TOKEN})))
    finish_all(scheduler)
    assert sequence.finish_reason == "stop"


# ---- numbers ----


def test_latencies(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = scheduler.add(make_request(1, 6, 3, arrival=10.0))
    for now in (11.0, 12.0, 12.25, 12.5):
        commit(scheduler, scheduler.schedule(now), now=now)
    assert (sequence.first_token_at, sequence.last_token_at) == (12.0, 12.5)
    stats = scheduler.stats
    assert (sum(stats.time_to_first_token.counts), stats.time_to_first_token.sum) == (1, 2.0)
    assert (sum(stats.inter_token_latency.counts), stats.inter_token_latency.sum) == (2, 0.5)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (6, 3, 4)


def test_logprobs_are_fetched_when_a_row_that_samples_wants_them(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request(1, 1, 9))
    scheduler.add(make_request(2, 5, 2, logprobs=0))
    wants = []
    while scheduler.has_requests:
        step = scheduler.schedule(0.0)
        assert step is not None
        wants.append(step.wants_logprobs)
        commit(scheduler, step)
    assert wants == [False, True, True, *[False] * 6]


def test_the_same_calls_give_the_same_plans(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    def plans() -> list[bytes]:
        scheduler = make_scheduler(num_pages=8, page_size=2)
        for number in range(6):
            scheduler.add(make_request(number, 3 + number, 5))
        buffers = []
        while scheduler.has_requests:
            step = scheduler.schedule(0.0)
            assert step is not None
            buffers.append(step.plan.buffer.tobytes())
            commit(scheduler, step)
        return buffers

    assert plans() == plans()

"""Scheduler with exact values: who is let in, which tokens run in each step, how sequences end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.core import Scheduler
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.request import MAX_SUPPRESSED, Request, Sequence, Status

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]
TOKEN = 7  # what the device samples, unless a test says otherwise


# ---- at the door ----


def test_prompts_that_can_never_run_are_refused(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_pages=10, page_size=4, max_model_len=50)
    scheduler.check_prompt(39)
    with pytest.raises(PromptExceedsPool, match="40 tokens"):
        scheduler.check_prompt(40)
    with pytest.raises(PromptExceedsPool):
        scheduler.check_prompt(49)
    with pytest.raises(PromptTooLong, match="50 tokens"):
        scheduler.check_prompt(50)
    assert not list(scheduler.sequences())


def test_the_context_is_named_first(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_pages=100, page_size=4, max_model_len=50)
    scheduler.check_prompt(49)
    with pytest.raises(PromptTooLong, match="maximum context length is 50 tokens"):
        scheduler.check_prompt(50)


@pytest.mark.parametrize(
    ("prompt", "asked", "given"),
    [(10, 5, 5), (10, 30, 30), (10, 31, 30), (10, None, 30), (39, None, 1)],
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
    scheduler = make_scheduler(max_waiting=4, max_num_seqs=1)
    scheduler.check_queue(5, 5, 0.0)  # one of them would start at once
    with pytest.raises(QueueFull, match="4 requests"):
        scheduler.check_queue(6, 6, 0.0)
    for number in range(3):
        scheduler.add(make_request(number, 2))
    scheduler.check_queue(2, 2, 0.0)  # one of them all will start at once
    with pytest.raises(QueueFull):
        scheduler.check_queue(3, 3, 0.0)
    scheduler.advance()
    scheduler.check_queue(2, 2, 0.0)
    with pytest.raises(QueueFull):
        scheduler.check_queue(3, 3, 0.0)


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
    assert [scheduler.advance() for _ in steps] == [[(1, length)] for length in steps]
    assert sequence.finish_reason == "length"
    assert scheduler.stats.plan_tokens["real"] == 12


def test_pages_come_one_by_one_as_tokens_appear(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=6)
    sequence = scheduler.add(make_request(1, 7, 6))
    held = []
    while list(scheduler.sequences()):
        step = scheduler.schedule(0.0)
        held.append((sequence.num_computed, len(sequence.pages)))
        scheduler.give(step)
    assert held == [(6, 2), (7, 2), (8, 2), (9, 3), (10, 3), (11, 3), (12, 3)]
    assert scheduler.cache.pool.num_held == 0


def test_rows_that_decode_come_first_then_chunks_by_age(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    scheduler.add(make_request(1, 12))
    scheduler.add(make_request(2, 3))
    scheduler.add(make_request(3, 12))
    assert scheduler.advance() == [(1, 10)]
    assert scheduler.advance() == [(1, 2), (2, 3), (3, 5)]
    scheduler.add(make_request(4, 4))
    assert scheduler.advance() == [(1, 1), (2, 1), (3, 7), (4, 1)]
    assert scheduler.advance() == [(1, 1), (2, 1), (3, 1), (4, 3)]
    assert scheduler.advance() == [(1, 1), (2, 1), (3, 1), (4, 1)]


def test_kinds_of_plans(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40, max_num_seqs=4)
    for number, length in ((1, 1), (2, 20), (3, 5)):
        scheduler.add(make_request(number, length))
    first = scheduler.schedule(0.0)
    assert first is not None
    assert str(first.plan.key) == "mixed[tokens=32,rows=4,pages=8]"
    scheduler.give(first)
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
    scheduler.advance()
    long = scheduler.add(make_request(4, 500, 2))
    steps = [scheduler.advance() for _ in range(100)]
    assert steps == [[(1, 1), (2, 1), (3, 1), (4, 5)]] * 100
    assert long.num_computed == 500
    assert len(long.tokens) == 501


def test_no_more_rows_than_the_budget_can_advance(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=3)
    assert scheduler.config.max_rows == scheduler.slots.num_free == 3
    for number in range(5):
        scheduler.add(make_request(number, 1, 4))
    assert scheduler.advance() == [(0, 1), (1, 1), (2, 1)]
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (3, 2)
    assert scheduler.advance() == [(0, 1), (1, 1), (2, 1)]


def test_admission_leaves_the_pages_that_running_rows_still_need(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """The first prompt holds 2 pages of the 5 that it needs; 4 are free, 3 of them spoken for."""
    scheduler = make_scheduler(
        num_pages=6, page_size=4, max_num_batched_tokens=16, max_chunk_tokens=8
    )
    scheduler.add(make_request(1, 20, 2))
    scheduler.add(make_request(2, 5, 2))
    assert scheduler.advance() == [(1, 8)]
    assert scheduler.cache.pool.num_free == 4
    assert scheduler.advance() == [(1, 8)]
    assert scheduler.advance() == [(1, 4)]
    assert scheduler.advance() == [(1, 1)]
    assert scheduler.advance() == [(2, 5)]
    assert scheduler.stats.preemptions["recompute"] == 0


def test_admission_leaves_the_page_of_the_next_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    """The first row's next token crosses into the last free page: who took it now would be
    preempted at once."""
    scheduler = make_scheduler(num_pages=3, page_size=4)
    scheduler.add(make_request(1, 7, 4))
    assert scheduler.advance() == [(1, 7)]
    scheduler.add(make_request(2, 2, 2))
    assert [scheduler.advance() for _ in range(3)] == [[(1, 1)]] * 3
    assert scheduler.advance() == [(2, 2)]
    assert scheduler.stats.preemptions["recompute"] == 0


def test_nobody_overtakes_the_head_of_the_queue(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(num_pages=4, page_size=4)
    scheduler.add(make_request(1, 5, 2))
    scheduler.add(make_request(2, 12, 2))
    scheduler.add(make_request(3, 1, 2))
    assert scheduler.advance() == [(1, 5)]
    assert scheduler.advance() == [(1, 1)]
    assert scheduler.advance() == [(2, 12)]


# ---- ends ----


def waiting(scheduler: Any, add: Callable[[], Sequence]) -> Sequence:
    sequence = add()
    assert sequence.status is Status.WAITING
    return sequence


def in_its_prompt(scheduler: Any, add: Callable[[], Sequence]) -> Sequence:
    sequence = add()
    assert scheduler.advance()[-1] == (9, 3)
    return sequence


def decoding(scheduler: Any, add: Callable[[], Sequence]) -> Sequence:
    sequence = add()
    for _ in range(4):
        scheduler.advance()
    assert len(sequence.tokens) > sequence.num_prompt
    return sequence


def in_flight(scheduler: Any, add: Callable[[], Sequence]) -> Sequence:
    sequence = decoding(scheduler, add)
    scheduler.schedule(0.0)
    assert sequence.num_pending == 1
    return sequence


def preempted(scheduler: Any, add: Callable[[], Sequence]) -> Sequence:
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
    scheduler.advance()
    sequence = state(scheduler, lambda: scheduler.add(make_request(9, 7, 20)))
    assert scheduler.abort("9") is sequence
    scheduler.check_invariants()
    assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")
    assert scheduler.cache.pool.num_held == len(other.pages)
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
    assert scheduler.give(step) == []
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
    scheduler.finish_all()
    assert len(sequence.tokens) - sequence.num_prompt == count
    assert sequence.finish_reason == reason
    assert scheduler.stats.finished[reason] == 1


def test_an_end_token_at_the_limit_is_a_stop(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request(1, 3, 1, stop_ids=frozenset({TOKEN})))
    scheduler.finish_all()
    assert sequence.finish_reason == "stop"


# ---- numbers ----


def test_latencies(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = scheduler.add(make_request(1, 6, 3, arrival=10.0))
    for now in (11.0, 12.0, 12.25, 12.5):
        scheduler.give(scheduler.schedule(now), now=now)
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
    while list(scheduler.sequences()):
        step = scheduler.schedule(0.0)
        assert step is not None
        wants.append(step.wants_logprobs)
        scheduler.give(step)
    assert wants == [False, True, True, *[False] * 6]


def test_the_same_calls_give_the_same_plans(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    def plans() -> list[bytes]:
        scheduler = make_scheduler(num_pages=8, page_size=2)
        for number in range(6):
            scheduler.add(make_request(number, 3 + number, 5))
        buffers = []
        while list(scheduler.sequences()):
            step = scheduler.schedule(0.0)
            assert step is not None
            buffers.append(step.plan.buffer.tobytes())
            scheduler.give(step)
        return buffers

    assert plans() == plans()

"""The engine loop over a fake device: failures, aborts, stop strings, errors of one text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.outputs import Delta
from jaxserve.runtime.runner import StepResult
from jaxserve.text.ids_only import IdsOnlyTokenizer
from scheduler.buckets import BucketGrid, Pow2, Single
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler, Step
from scheduler.errors import (
    InvalidParameter,
    PromptExceedsPool,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from scheduler.plan import plan_layout
from scheduler.request import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterTokenizer(IdsOnlyTokenizer):
    """Token id i is the i-th letter."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 26

    has_text = True

    def token_bytes(self, token_id: int) -> bytes:
        return LETTERS[token_id].encode()


@dataclass
class FakeRunner:
    """Samples (context_len mod 26): a row's text is the alphabet, from its prompt's length on."""

    fail_at: set[int] = field(default_factory=set)
    submitted: int = 0
    resets: int = 0

    def submit(self, step: Step) -> FakeHandle:
        self.submitted += 1
        lanes = plan_layout(step.plan.key).views(step.plan.buffer)
        return FakeHandle(lanes["context_len"] % 26, self.submitted in self.fail_at)

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        pass


@dataclass
class FakeHandle:
    tokens: np.ndarray
    fails: bool

    def result(self) -> StepResult:
        if self.fails:
            raise RuntimeError("the device is on fire")
        return StepResult(self.tokens.astype(np.int32))


def make_engine(
    runner: FakeRunner | None = None, *, lookahead: bool = True, max_waiting: int | None = None
) -> Engine:
    config = SchedulerConfig(
        num_pages=16,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=100,
        max_waiting=max_waiting,
    )
    grid = BucketGrid.build(
        rows=Pow2(), tokens=Single(), pages=Single(), max_rows=4, max_tokens=16, max_pages=16
    )
    return Engine(
        Scheduler(config, grid),
        runner or FakeRunner(),
        LetterTokenizer(),
        vocab_size=26,
        eos_ids={25},
        lookahead=lookahead,
    )


def add(engine: Engine, name: str, prompt: list[int], **options: object) -> None:
    # type: ignore[arg-type]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5} | options)
    requests = engine.requests(name, prompt, params, engine.clock())
    engine.check_queue(requests)
    for request in requests:
        engine.add(request)


def run(engine: Engine, steps: int = 500) -> dict[str, list[Delta]]:
    made: dict[str, list[Delta]] = {}
    for _ in range(steps):
        if not engine.has_work:
            engine.scheduler.check_invariants()
            return made
        for delta in engine.step():
            made.setdefault(delta.request_id, []).append(delta)
    raise AssertionError("the engine does not become idle")


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("lookahead", [True, False])
def test_text_and_reasons(lookahead: bool) -> None:
    engine = make_engine(lookahead=lookahead)
    add(engine, "length", [0], max_tokens=4)
    add(engine, "eos", [0] * 22, max_tokens=20)
    add(engine, "kept", [0] * 22, max_tokens=5, ignore_eos=True)
    add(engine, "id", [0], max_tokens=20, stop_token_ids=[3])
    add(engine, "shown", [0], max_tokens=20, stop_token_ids=[3], include_stop_str_in_output=True)
    made = run(engine)
    assert text(made["length-0"]) == "bcde"
    assert made["length-0"][-1].finish_reason == "length"
    assert text(made["eos-0"]) == "wxy"
    assert made["eos-0"][-1].finish_reason == "stop"
    assert made["eos-0"][-1].stop_reason is None
    assert text(made["kept-0"]) == "wxyza"
    assert text(made["id-0"]) == "bc"
    assert made["id-0"][-1].stop_reason == 3
    assert text(made["shown-0"]) == "bcd"


@pytest.mark.parametrize("lookahead", [True, False])
def test_a_stop_string_over_several_tokens_never_leaks(lookahead: bool) -> None:
    """vllm#3574: what is streamed ends right before the stop string, whatever the token borders."""
    engine = make_engine(lookahead=lookahead)
    add(engine, "stop", [0], max_tokens=20, stop=["efg", "xyz"])
    add(engine, "shown", [0], max_tokens=20, stop=["efg"], include_stop_str_in_output=True)
    made = run(engine)
    assert text(made["stop-0"]) == "bcd"
    assert made["stop-0"][-1].stop_reason == "efg"
    assert [delta.text for delta in made["stop-0"]][:3] == ["b", "c", "d"]
    assert text(made["shown-0"]) == "bcdefg"


def test_a_stop_string_at_the_last_token_counts_as_stop() -> None:
    engine = make_engine()
    add(engine, "both", [0], max_tokens=4, stop=["e"])
    made = run(engine)
    assert made["both-0"][-1].finish_reason == "stop"
    assert engine.scheduler.stats.finished["stop"] == 1
    assert engine.scheduler.stats.finished["length"] == 0


def test_held_back_text_is_flushed_at_the_end() -> None:
    engine = make_engine()
    add(engine, "almost", [0], max_tokens=5, stop=["fgh"])
    assert text(run(engine)["almost-0"]) == "bcdef"


@pytest.mark.parametrize("lookahead", [True, False])
def test_one_failed_step_is_computed_again(lookahead: bool) -> None:
    """sglang-jax PR#230: an exception in a step must not poison the requests after it."""
    runner = FakeRunner(fail_at={3})
    engine = make_engine(runner, lookahead=lookahead)
    for i in range(3):
        add(engine, str(i), [0] * (i + 1), max_tokens=6)
    made = run(engine)
    assert runner.resets == 1
    assert [text(made[f"{i}-0"]) for i in range(3)] == ["bcdefg", "cdefgh", "defghi"]
    assert engine.scheduler.stats.preemptions["recompute"] == 3


def test_two_failed_steps_end_their_requests_and_the_next_ones_run() -> None:
    runner = FakeRunner(fail_at={2, 3, 4, 5})
    engine = make_engine(runner, lookahead=False)
    add(engine, "doomed", [0], max_tokens=6)
    made = run(engine)
    assert made["doomed-0"][-1].finish_reason == "error"
    assert "on fire" in (made["doomed-0"][-1].error or "")
    runner.fail_at.clear()
    add(engine, "next", [0], max_tokens=3)
    assert text(run(engine)["next-0"]) == "bcd"
    finished = engine.scheduler.stats.finished
    assert (finished["error"], finished["length"]) == (1, 1)


def test_a_failure_without_running_rows_gives_up_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    add(engine, "stuck", [0])

    def broken(now: float) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    made = run(engine)
    assert made["stuck-0"][-1].finish_reason == "error"


def test_a_text_that_fails_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    add(engine, "bad", [0], max_tokens=6)
    add(engine, "good", [0], max_tokens=6)

    def broken(token_ids: object) -> str:
        raise ValueError("no such token")

    monkeypatch.setattr(engine._live["bad-0"].text, "push", broken)
    made = run(engine)
    assert made["bad-0"][-1].finish_reason == "error"
    assert text(made["good-0"]) == "bcdefg"


def test_a_report_that_fails_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    add(engine, "bad", [0], max_tokens=6, logprobs=1)  # the fake device reports none
    add(engine, "good", [0], max_tokens=6)
    made = run(engine)
    assert made["bad-0"][-1].finish_reason == "error"
    assert len(made["bad-0"]) == 1
    assert text(made["good-0"]) == "bcdefg"
    assert engine.scheduler.stats.finished["error"] == 1


def test_abort_in_each_state_frees_everything() -> None:
    engine = make_engine()
    for i in range(6):  # four run, two wait
        add(engine, str(i), [0] * 10, max_tokens=30)
    engine.abort("5-0")
    engine.step()
    engine.abort("0-0")
    engine.step()
    for i in range(6):
        engine.abort(f"{i}-0")
        engine.abort(f"{i}-0")
    made = run(engine, steps=3)
    assert engine.scheduler.stats.pages_held == 0
    assert engine.scheduler.stats.finished["abort"] == 6
    assert {deltas[-1].finish_reason for deltas in made.values()} <= {"abort"}


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, InvalidParameter, "at least one token"),
        ([-1], {}, InvalidParameter, "between 0 and 25, got -1"),
        ([26], {}, InvalidParameter, "got 26"),
        ([10**9], {}, InvalidParameter, "got 1000000000"),
        ([0] * 100, {}, PromptTooLong, "maximum context length is 100 tokens"),
        ([0] * 64, {}, PromptExceedsPool, "has 64 tokens, but the KV cache pool"),
        ([0], {"stop_token_ids": [26]}, InvalidParameter, "between 0 and 25"),
        (
            [0],
            {"min_tokens": 2, "stop_token_ids": list(range(12))},
            InvalidParameter,
            "at most 8 end tokens",
        ),
        ([0], {"max_tokens": 0}, InvalidParameter, "at least 1"),
    ],
)
def test_bad_requests_name_the_limit_and_change_nothing(
    prompt: list[int], options: dict[str, object], error: type[RequestError], words: str
) -> None:
    engine = make_engine()
    with pytest.raises(error, match=words):
        add(engine, "bad", prompt, **options)
    assert not engine.has_work
    add(engine, "good", [0], max_tokens=2)
    assert text(run(engine)["good-0"]) == "bc"


def test_n_choices_are_taken_all_or_none() -> None:
    """vllm PR#53936: a request may not be admitted in part."""
    engine = make_engine(max_waiting=2)  # and four find a slot at once
    with pytest.raises(QueueFull):
        add(engine, "zeroth", [0], n=7)
    add(engine, "first", [0], n=4)
    with pytest.raises(QueueFull):
        add(engine, "second", [0], n=3)
    assert len(engine.scheduler.waiting) == 4
    engine.step()
    add(engine, "third", [0], n=2)
    with pytest.raises(QueueFull):
        add(engine, "fourth", [0])


def test_seeds_make_choices_differ_and_repeat() -> None:
    engine = make_engine()
    params = SamplingParams(n=4, seed=7)
    keys = [request.key for request in engine.requests("a", [0], params, 0.0)]
    again = [request.key for request in engine.requests("b", [0], params, 0.0)]
    assert keys == again
    assert len(set(keys)) == 4
    unseeded = SamplingParams(n=1)
    assert engine.requests("c", [0], unseeded, 0.0)[0].key != keys[0]
    negative = engine.requests("d", [0], SamplingParams(seed=-1), 0.0)[0].key
    assert negative == engine.requests("e", [0], SamplingParams(seed=2**64 - 1), 0.0)[0].key


def test_a_storm_of_preemptions_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """vllm#11805."""
    engine = make_engine()
    preemptions = engine.scheduler.stats.preemptions
    for now in (1.0, 2.0, 60.0, 61.0, 200.0, 300.0):
        preemptions["recompute"] += now < 250.0
        engine._warn_of_preemptions(now)
    told = [record.getMessage().split()[0] for record in caplog.records]
    assert told == ["1", "3", "1"]

"""The engine loop when a deadline passes: what a client hears, and that nobody else notices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from jaxserve.engine import Engine
from jaxserve.outputs import Delta
from scheduler.buckets import BucketGrid, Pow2, Single
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.errors import UnsupportedParameter
from scheduler.policy import Fcfs, Priority, QueuePolicy
from scheduler.request import RequestOptions, SamplingParams
from tests.engine.test_engine import FakeRunner, LetterTokenizer


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    clock: Clock,
    *,
    lookahead: bool = True,
    max_num_seqs: int = 2,
    policy: QueuePolicy | None = None,
    fail_at: frozenset[int] = frozenset(),
) -> Engine:
    config = SchedulerConfig(
        num_pages=32,
        page_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=100,
    )
    grid = BucketGrid.build(
        rows=Pow2(), tokens=Single(), pages=Single(), max_rows=2, max_tokens=16, max_pages=25
    )
    return Engine(
        Scheduler(config, grid, policy=policy or Fcfs()),
        FakeRunner(set(fail_at)),
        LetterTokenizer(),
        vocab_size=26,
        eos_ids={25},
        lookahead=lookahead,
        clock=clock,
    )


def add(
    engine: Engine, name: str, timeout: float | None = None, *, priority: int = 0, **params: Any
) -> None:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 20} | params)
    options = RequestOptions(timeout=timeout, priority=priority)
    for request in engine.requests(name, [0], asked, engine.clock(), options):
        engine.add(request)


class Listener:
    """What the clients of an engine have heard."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.deltas: dict[str, list[Delta]] = {}

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for delta in self.engine.step():
                self.deltas.setdefault(delta.request_id, []).append(delta)
            self.engine.scheduler.check_invariants()

    def finish(self) -> None:
        for _ in range(200):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not become idle")

    def text(self, name: str) -> str:
        return "".join(delta.text for delta in self.deltas[name])

    def end(self, name: str) -> str | None:
        """Why it ended; it was told once, and last."""
        reasons = [delta.finish_reason for delta in self.deltas[name]]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        return reasons[-1]


@pytest.mark.parametrize("lookahead", [True, False])
def test_one_that_runs_ends_with_what_it_has(lookahead: bool) -> None:
    clock = Clock()
    heard = Listener(engine := make_engine(clock, lookahead=lookahead))
    add(engine, "late", timeout=5.0)
    add(engine, "other")
    heard.step(5)
    clock.now = 105.0
    heard.finish()
    made = 4 if lookahead else 5
    assert heard.text("late-0") == "bcdef"[:made]
    assert heard.end("late-0") == "timeout"
    last = heard.deltas["late-0"][-1]
    assert (last.token_ids, last.num_prompt_tokens, last.num_output_tokens) == ((), 1, made)
    assert last.error is None
    assert heard.text("other-0") == "bcdefghijklmnopqrstu"
    assert heard.end("other-0") == "length"
    assert engine.scheduler.stats.finished["timeout"] == 1
    assert engine.scheduler.stats.pages_held == 0


def test_one_that_waits_ends_without_a_token() -> None:
    """vllm#2901: it would have waited for hours."""
    clock = Clock()
    heard = Listener(engine := make_engine(clock, max_num_seqs=1))
    add(engine, "first")
    add(engine, "waits", timeout=0.5, logprobs=1)
    heard.step(3)
    clock.now = 100.5
    heard.step()
    [last] = heard.deltas["waits-0"]
    assert (last.text, last.finish_reason, last.num_output_tokens) == ("", "timeout", 0)
    assert last.logprobs == ()
    heard.finish()
    assert heard.end("first-0") == "length"


def test_one_that_arrives_too_late_never_runs() -> None:
    clock = Clock()
    heard = Listener(engine := make_engine(clock))
    add(engine, "late", timeout=0.001)
    clock.now = 101.0
    heard.finish()
    assert heard.end("late-0") == "timeout"
    assert isinstance(engine.runner, FakeRunner)
    assert engine.runner.submitted == 0


def test_text_that_was_held_back_comes_with_the_end() -> None:
    """It may have been the beginning of a stop string; now it is the end of the answer."""
    clock = Clock()
    heard = Listener(engine := make_engine(clock, lookahead=False))
    add(engine, "held", timeout=1.0, stop=["efz"])
    heard.step(5)
    assert heard.text("held-0") == "bcd"
    clock.now = 101.0
    heard.finish()
    assert heard.text("held-0") == "bcdef"
    assert heard.end("held-0") == "timeout"


def test_every_choice_ends() -> None:
    """One of them still waits for a slot."""
    clock = Clock()
    heard = Listener(engine := make_engine(clock, lookahead=False))
    add(engine, "many", timeout=1.0, n=3)
    heard.step(2)
    clock.now = 101.0
    heard.finish()
    assert [heard.text(f"many-{i}") for i in range(3)] == ["bc", "bc", ""]
    assert [heard.end(f"many-{i}") for i in range(3)] == ["timeout"] * 3
    assert engine.scheduler.stats.finished["timeout"] == 3


def test_the_last_token_in_flight_comes_too_late() -> None:
    clock = Clock()
    heard = Listener(engine := make_engine(clock))
    add(engine, "close", timeout=1.0, max_tokens=2)
    heard.step(2)
    assert heard.text("close-0") == "b"
    clock.now = 101.0
    heard.finish()
    assert heard.end("close-0") == "timeout"
    assert heard.text("close-0") == "b"


@pytest.mark.parametrize("first", ["abort", "deadline"])
def test_an_abort_and_a_deadline_at_once_end_it_once(first: str) -> None:
    clock = Clock()
    heard = Listener(engine := make_engine(clock))
    add(engine, "both", timeout=1.0)
    heard.step(3)
    clock.now = 101.0
    if first == "abort":
        engine.abort("both-0")
        heard.finish()
    else:
        heard.finish()
        engine.abort("both-0")
        assert not engine.has_work
    assert heard.end("both-0") == ("abort" if first == "abort" else "timeout")
    assert sum(engine.scheduler.stats.finished.values()) == 1


@pytest.mark.parametrize("failures", [1, 2])
def test_a_deadline_passes_while_steps_fail(failures: int) -> None:
    """Both are told: the one that timed out, and the one whose steps failed twice."""
    clock = Clock()
    fail_at = frozenset(range(3, 3 + failures))
    heard = Listener(engine := make_engine(clock, lookahead=False, fail_at=fail_at))
    add(engine, "late", timeout=1.0)
    add(engine, "other", max_tokens=4)
    heard.step(2)
    clock.now = 101.0
    heard.finish()
    assert (heard.text("late-0"), heard.end("late-0")) == ("bc", "timeout")
    assert heard.end("other-0") == ("length" if failures == 1 else "error")
    if failures == 1:
        assert heard.text("other-0") == "bcde"


def test_a_preempted_one_keeps_what_it_had_said() -> None:
    clock = Clock()
    heard = Listener(engine := make_engine(clock, max_num_seqs=1, policy=Priority()))
    add(engine, "low", timeout=1.0, priority=1)
    heard.step(4)
    add(engine, "high", priority=0)
    heard.step(4)
    clock.now = 101.0
    heard.finish()
    # with lookahead the token that was in flight when it gave way has arrived too
    assert (heard.text("low-0"), heard.end("low-0")) == ("bcde", "timeout")
    assert heard.end("high-0") == "length"
    assert engine.scheduler.stats.preemptions["recompute"] == 1


def test_a_priority_has_a_meaning_only_under_its_policy() -> None:
    engine = make_engine(Clock())
    with pytest.raises(UnsupportedParameter, match=r"priority.*--policy priority"):
        add(engine, "vain", priority=1)
    assert not engine.has_work
    add(engine, "plain", priority=0)

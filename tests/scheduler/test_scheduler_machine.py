"""A hypothesis state machine over Scheduler, with a device that remembers what every page holds.

The device is an oracle. Its cache keeps, for each token, a hash of the whole prefix that led to it,
made from the entry before it in the row's own pages, as attention would read it. So a page that is
reused too early, a wrong position, a stale placeholder or a recompute that was forgotten changes
what is sampled, and is also seen directly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler, Step
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.pages import pages_for
from scheduler.plan import DROPPED, plan_layout
from scheduler.request import Request, SamplingParams, Sequence, Status

VOCAB = 8
EMPTY = -1  # a cache entry that nothing has written
ROOT = 0  # the hash of the empty prefix


def extend(state: int, token: int) -> int:
    """The hash of a prefix with one more token."""
    return hash((state, token)) & 0x7FFFFFFFFFFFFFFF


def choose(state: int, suppressed: set[int]) -> int:
    """The token that follows a prefix: the first allowed one from a place that the hash names."""
    return next(t for i in range(VOCAB) if (t := (state + i) % VOCAB) not in suppressed)


@dataclass
class Alone:
    """What a request gives when nothing else runs. The chain goes on past the end on purpose: rows
    in flight when a sequence ends are computed too."""

    request: Request

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt.tolist()
        self.states = [ROOT]  # states[i]: the hash of the first i tokens
        for token in self.tokens:
            self.states.append(extend(self.states[-1], token))

    def grow(self, length: int) -> None:
        request = self.request
        hold_until = len(request.prompt) + request.params.min_tokens
        while len(self.tokens) < length:
            held = request.stop_ids if len(self.tokens) < hold_until else frozenset()
            self.tokens.append(choose(self.states[-1], set(held)))
            self.states.append(extend(self.states[-1], self.tokens[-1]))

    def end(self) -> tuple[list[int], str]:
        """The output ids and the reason of the whole request."""
        request, start = self.request, len(self.request.prompt)
        self.grow(start + request.max_tokens)
        for count in range(request.params.min_tokens + 1, request.max_tokens + 1):
            if self.tokens[start + count - 1] in request.stop_ids:
                return self.tokens[start : start + count], "stop"
        return self.tokens[start : start + request.max_tokens], "length"


class Device:
    """Runs plans in the order in which they come. The cache is int64[pages * page_size]."""

    def __init__(self, config: SchedulerConfig):
        self.page_size = config.page_size
        self.size = (config.num_pages + 1) * config.page_size
        self.max_rows = config.max_rows
        self.reset()

    def reset(self) -> None:
        self.cache = np.full(self.size, EMPTY, np.int64)
        self.last_token = [EMPTY] * self.max_rows

    def run(self, step: Step, alone: dict[tuple[int, int], Alone]) -> np.ndarray:
        """Checks every lane of the plan against what each row's request alone would hold, and
        returns the sampled tokens."""
        plan = step.plan
        view = plan_layout(plan.key).views(plan.buffer)
        ids = [i if i >= 0 else self.last_token[-i - 1] for i in view["token_ids"].tolist()]
        sampled = np.full(plan.key.rows, EMPTY, np.int32)
        written: list[int] = []
        rows: list[tuple[int, int]] = []
        stores: list[tuple[int, int]] = []
        start = 0
        for row in range(plan.num_rows):
            key = tuple(view["key"][row].tolist())
            request = alone[key]
            rows.append(key)
            length, context = int(view["query_len"][row]), int(view["context_len"][row])
            assert view["query_start"][row] == start
            assert 1 <= length <= context
            request.grow(context + 1)
            table = view["block_tables"][row]
            held = table[: pages_for(context, self.page_size)].tolist()
            assert 0 not in held
            assert len(set(held)) == len(held)

            def index(position: int, table: np.ndarray = table) -> int:
                return int(table[position // self.page_size]) * self.page_size + (
                    position % self.page_size
                )

            for place, position in enumerate(range(context - length, context), start=start):
                assert view["positions"][place] == position
                assert ids[place] == request.tokens[position], "a token is not the row's own"
                assert view["write_index"][place] == index(position)
                before = int(self.cache[index(position - 1)]) if position else ROOT
                self.cache[index(position)] = extend(before, ids[place])
                written.append(index(position))
            start += length
            found = [int(self.cache[index(position)]) for position in range(context)]
            assert found == request.states[1 : context + 1], "the pages don't hold the row's tokens"

            slot = int(view["sample_slot"][row])
            params = request.request.params
            assert view["temperature"][row] == np.float32(params.temperature)
            assert view["num_logprobs"][row] == (-1 if params.logprobs is None else params.logprobs)
            if slot != DROPPED:
                suppressed = {i for i in view["suppressed"][row].tolist() if i != DROPPED}
                minimum = len(request.request.prompt) + params.min_tokens
                assert suppressed == (request.request.stop_ids if context < minimum else set())
                sampled[row] = choose(found[-1], suppressed)
                stores.append((slot, int(sampled[row])))
        assert start == plan.num_tokens
        assert len(set(rows)) == len(rows), "a sequence is twice in one plan"
        assert len(set(written)) == len(written), "two tokens are written to one place"
        assert len({slot for slot, _ in stores}) == len(stores)
        for slot, token in stores:
            self.last_token[slot] = token

        named = [(row, s.request.key) for row, s in step.sampled]
        assert named == [
            (r, key) for r, key in enumerate(rows) if view["sample_slot"][r] != DROPPED
        ]
        wanted = any(s.request.params.logprobs is not None for _, s in step.sampled)
        assert step.wants_logprobs == wanted
        self.check_padding(step)
        return sampled

    def check_padding(self, step: Step) -> None:
        plan = step.plan
        layout = plan_layout(plan.key)
        view, blank = layout.views(plan.buffer), layout.views(layout.blank)
        for lane in layout.lanes:
            real = plan.num_tokens if lane.shape[0] != plan.key.rows else plan.num_rows
            if lane.name in ("token_ids", "positions", "write_index"):
                real = plan.num_tokens
            assert np.array_equal(view[lane.name][real:], blank[lane.name][real:])
        assert (view["write_index"][plan.num_tokens :] == DROPPED).all()
        assert (view["sample_slot"][plan.num_rows :] == DROPPED).all()
        assert (view["context_len"][plan.num_rows :] == 0).all()


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page_size = draw(st.sampled_from([1, 4, 16]))
    return SchedulerConfig(
        # mostly so few that rows must be preempted
        num_pages=draw(st.one_of(st.integers(2, 2 + 40 // page_size), st.integers(2, 40))),
        page_size=page_size,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 64)),
        max_model_len=draw(st.sampled_from([6, 20, 64, 100])),
        max_chunk_tokens=draw(st.sampled_from([None, None, 1, 3])),
        max_waiting=draw(st.sampled_from([None, None, 3])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        config=configs(),
        buckets=st.sampled_from(sorted(BUCKET_STRATEGIES)),
        min_rows=st.integers(1, 2),
        lookahead=st.sampled_from([0, 1, 1, 2]),
    )
    def build(self, config: SchedulerConfig, buckets: str, min_rows: int, lookahead: int) -> None:
        strategy = BUCKET_STRATEGIES[buckets]
        self.config = config
        self.grid = BucketGrid.build(
            rows=strategy,
            tokens=strategy,
            pages=strategy,
            max_rows=config.max_rows,
            max_tokens=config.max_num_batched_tokens,
            max_pages=config.max_pages_per_sequence,
            min_rows=min_rows,
        )
        self.keys = set(self.grid.keys())
        self.scheduler = Scheduler(config, self.grid)
        self.device = Device(config)
        self.lookahead = lookahead
        self.in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self.alone: dict[tuple[int, int], Alone] = {}
        self.live: list[Sequence] = []  # in order of arrival
        self.cut: set[int] = set()  # orders of those that the engine stopped
        self.num_ended = 0
        self.now = 0.0
        self.stalled = False  # the last schedule() had nothing to run
        self.real = self.padded = self.num_steps = self.generated = 0

    # ---- requests ----

    @rule(
        copies=st.integers(1, 4),
        length=st.one_of(st.integers(1, 12), st.integers(1, 60)),
        seed=st.integers(0, 2**16),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        stop_ids=st.sampled_from([frozenset[int](), frozenset({1}), frozenset({0, 2, 5})]),
        min_tokens=st.sampled_from([0, 0, 1, 5]),
        logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def add(
        self,
        copies: int,
        length: int,
        seed: int,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        min_tokens: int,
        logprobs: int | None,
    ) -> None:
        config, scheduler = self.config, self.scheduler
        refusal = None
        if length >= config.max_model_len:
            refusal = PromptTooLong
        elif length >= config.num_pages * config.page_size:
            refusal = PromptExceedsPool
        elif config.max_waiting is not None and (
            len(scheduler.waiting) + copies
            > config.max_waiting + (0 if len(scheduler.waiting) else scheduler.slots.num_free)
        ):
            refusal = QueueFull
        if refusal is not None:
            with pytest.raises(refusal):
                scheduler.check(length, copies)
            return
        scheduler.check(length, copies)
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        random = np.random.default_rng(seed)
        for _ in range(copies):
            number = len(self.alone)
            request = Request(
                request_id=f"r{number}",
                prompt=random.integers(0, VOCAB, length, np.int32),
                params=SamplingParams(
                    temperature=number % 3 / 2,
                    max_tokens=max_tokens,
                    min_tokens=min_tokens,
                    logprobs=logprobs,
                ),
                max_tokens=scheduler.max_output(length, max_tokens),
                arrival=self.now,
                stop_ids=stop_ids,
                key=(number, number ^ 0xFFFFFFFF),
            )
            self.alone[request.key] = Alone(request)
            self.live.append(scheduler.add(request))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live), "aborted")
        held, free = len(sequence.pages), self.scheduler.pool.num_free
        assert self.scheduler.abort(sequence.request.request_id) is sequence
        assert sequence.finish_reason == "abort"
        assert self.scheduler.pool.num_free == free + held
        assert self.scheduler.abort(sequence.request.request_id) is None
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        """The engine ends a sequence whose text matched, whatever is in flight."""
        sequence = data.draw(st.sampled_from(self.live), "stopped")
        self.scheduler.finish(sequence, "stop")
        self.cut.add(sequence.order)
        self.settle()

    def settle(self) -> None:
        """Move what has ended out of `live`, and compare it with the request alone."""
        for sequence in [s for s in self.live if s.status is Status.FINISHED]:
            self.live.remove(sequence)
            self.num_ended += 1
            output = sequence.tokens[sequence.num_prompt :]
            expected, reason = self.alone[sequence.request.key].end()
            if sequence.finish_reason in ("abort", "error") or sequence.order in self.cut:
                assert output == expected[: len(output)]
            else:
                assert (output, sequence.finish_reason) == (expected, reason)

    # ---- steps ----

    @precondition(lambda self: len(self.in_flight) <= self.lookahead)
    @rule()
    def schedule(self) -> None:
        scheduler, config = self.scheduler, self.config
        decoding = [
            s
            for s in scheduler.running
            if s.num_tokens - s.num_computed == 1 and s.num_output < s.request.max_tokens
        ]
        crossing = [s for s in decoding if s.num_computed == len(s.pages) * config.page_size]
        plenty = scheduler.pool.num_free >= len(crossing)
        computed = {s.order: s.num_computed for s in self.live}
        preempted = scheduler.stats.preemptions["recompute"]

        step = scheduler.schedule(self.now)
        scheduler.check_invariants()
        self.stalled = step is None
        if step is None:
            assert self.in_flight or not self.live, "requests wait, but nothing can run"
            return
        plan = step.plan
        self.num_steps += 1
        self.real += plan.num_tokens
        self.padded += plan.key.tokens - plan.num_tokens
        assert plan.key in self.keys
        assert 1 <= plan.num_tokens <= config.max_num_batched_tokens
        assert 1 <= plan.num_rows <= config.max_rows
        if plan.key.kind == "decode":
            assert plan.num_tokens == plan.num_rows
        moved = {s.order for s in self.live if s.num_computed > computed[s.order]}
        if not self.in_flight:
            assert self.live[0].order in moved, "the oldest sequence does not advance"
        if plenty and scheduler.stats.preemptions["recompute"] == preempted:
            assert moved >= {s.order for s in decoding}, "a decoding row is left out"
        self.in_flight.append((step, self.device.run(step, self.alone)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        step, tokens = self.in_flight.popleft()
        known = {s.order: len(s.tokens) for s in self.live}
        progress = self.scheduler.commit(step, SimpleNamespace(tokens=tokens), self.now)
        self.generated += len(progress)
        assert [p.sequence for p in progress] == [s for _, s in step.sampled if s in self.live]
        for p in progress:
            sequence = p.sequence
            assert sequence.tokens[known[sequence.order] :] == [p.token] == [tokens[p.row]]
            assert sequence.last_token_at == self.now
        self.settle()

    @rule(give_up=st.booleans())
    def fail(self, give_up: bool) -> None:
        """A step failed on the device: what is in flight is lost, and so is the cache."""
        running = list(self.scheduler.running)
        self.in_flight.clear()
        self.device.reset()
        assert self.scheduler.preempt_all() == running
        assert self.scheduler.pool.num_free == self.config.num_pages
        for sequence in running if give_up else ():
            self.scheduler.finish(sequence, "error")
        self.settle()

    @rule(seconds=st.floats(0.001, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 20))
    def iterate(self, count: int) -> None:
        """As the engine does: submit a step, then commit the one before it."""
        for _ in range(count):
            if not self.live:
                break
            self.now += 0.01
            if len(self.in_flight) <= self.lookahead:
                self.schedule()
            if len(self.in_flight) > self.lookahead or (self.in_flight and self.stalled):
                self.commit()
            self.scheduler.check_invariants()

    # ---- what holds after every rule ----

    @invariant()
    def holds(self) -> None:
        scheduler, pool, stats = self.scheduler, self.scheduler.pool, self.scheduler.stats
        scheduler.check_invariants()
        assert pool.num_free + pool.num_cached + pool.num_held == self.config.num_pages
        owners = [page for s in self.live for page in s.pages]
        assert pool.num_held == len(owners) == len(set(owners)), "a page has two owners"
        orders = [s.order for s in self.live]
        assert orders == sorted(orders)
        assert list(scheduler.sequences()) == self.live
        assert scheduler.has_requests == bool(self.live)
        for sequence in self.live:
            alone = self.alone[sequence.request.key]
            alone.grow(len(sequence.tokens))
            assert sequence.tokens == alone.tokens[: len(sequence.tokens)]
            pending = sum(s is sequence for step, _ in self.in_flight for _, s in step.sampled)
            assert sequence.num_pending == pending
        running = [s.status is Status.RUNNING for s in self.live]
        for older, younger in pairwise(running):
            assert older or not younger, "something younger runs while something older waits"

        gauges = (stats.num_running, stats.num_waiting)
        assert gauges == (len(scheduler.running), len(scheduler.waiting))
        assert sum(gauges) == len(self.live)
        pages = (stats.pages_free, stats.pages_cached, stats.pages_held)
        assert pages == (pool.num_free, pool.num_cached, pool.num_held)
        assert sum(stats.finished.values()) == self.num_ended
        assert self.num_ended + len(self.live) == len(self.alone)
        assert stats.prompt_tokens == sum(len(a.request.prompt) for a in self.alone.values())
        assert stats.generation_tokens == self.generated
        assert stats.steps == self.num_steps
        assert stats.plan_tokens == {"real": self.real, "padded": self.padded}
        latencies = (stats.time_to_first_token, stats.inter_token_latency)
        assert sum(sum(h.counts) for h in latencies) == self.generated

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # the oldest advances in each step, or in the one after the commit that it waits for
        self.iterate(2 * sum(s.num_prompt + s.request.max_tokens for s in self.live) + 2)
        assert not self.live, "not everything ended"
        while self.in_flight:
            self.commit()
        self.holds()
        assert self.scheduler.pool.num_free == self.config.num_pages
        assert self.scheduler.slots.num_free == self.config.max_rows
        assert sum(self.scheduler.stats.finished.values()) == len(self.alone)
        assert self.scheduler.schedule(self.now) is None


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

"""A hypothesis state machine over Scheduler, with a device that remembers what every page holds."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import ADMISSION
from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.errors import PromptExceedsPool, PromptTooLong, QueueFull
from scheduler.lengths import LENGTH_MODELS
from scheduler.policy import POLICIES
from scheduler.preemption import MAX_PREEMPTIONS, PreemptionCosts, is_protected
from scheduler.request import Request, RequestOptions, SamplingParams, Sequence, Status
from scheduler.step import Step
from tests.scheduler.device import VOCAB, Alone, Device


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
        num_host_pages=draw(st.sampled_from([0, 2, 5, 40])),
        prefix_cache=draw(st.sampled_from([True, True, False])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        config=configs(),
        buckets=st.sampled_from(sorted(BUCKET_STRATEGIES)),
        min_rows=st.integers(1, 2),
        lookahead=st.sampled_from([0, 1, 1, 2]),
        policy=st.sampled_from(["fcfs", *sorted(POLICIES)]),
        admission=st.sampled_from(["fits", *sorted(ADMISSION)]),
        lengths=st.sampled_from(sorted(LENGTH_MODELS)),
        costs=st.sampled_from(
            [PreemptionCosts(), PreemptionCosts(copy_base=5.0), PreemptionCosts(copy_out=99.0)]
        ),
    )
    def build(
        self,
        config: SchedulerConfig,
        buckets: str,
        min_rows: int,
        lookahead: int,
        policy: str,
        admission: str,
        lengths: str,
        costs: PreemptionCosts,
    ) -> None:
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
        model = LENGTH_MODELS[lengths]()
        self.policy = policy
        self.scheduler = Scheduler(
            config,
            self.grid,
            policy=POLICIES[policy](model),
            admission=ADMISSION[admission](model, 0.05),
            lengths=model,
            costs=costs,
        )
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
        length=st.one_of(st.integers(1, 12), st.sampled_from([4, 8, 16]), st.integers(1, 60)),
        seed=st.integers(0, 2**16),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        stop_ids=st.sampled_from([frozenset[int](), frozenset({1}), frozenset({0, 2, 5})]),
        min_tokens=st.sampled_from([0, 0, 1, 5]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        shared=st.sampled_from([0, 8, 40, 40]),
        options=st.builds(
            RequestOptions,
            priority=st.sampled_from([0, 0, -1, 1]),
            tenant=st.sampled_from(["", "a", "b"]),
            timeout=st.sampled_from([None, None, None, 0.05, 3.0]),
            cache_salt=st.sampled_from(["", "", "", "other"]),
        ),
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
        shared: int,
        options: RequestOptions,
    ) -> None:
        config, scheduler = self.config, self.scheduler
        refusal = None
        if length >= config.max_model_len:
            refusal = PromptTooLong
        elif length >= config.num_pages * config.page_size:
            refusal = PromptExceedsPool
        elif config.max_waiting is not None and (
            len(scheduler.waiting) + copies
            > config.max_waiting + (0 if scheduler._door.is_blocked else scheduler.slots.num_free)
        ):
            refusal = QueueFull
        if refusal is not None:
            with pytest.raises(refusal):
                self.check(length, copies)
            return
        self.check(length, copies)
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        random = np.random.default_rng(seed)
        if self.policy != "priority":
            options = replace(options, priority=0)
        for _ in range(copies):
            number = len(self.alone)
            prompt = random.integers(0, VOCAB, length, np.int32)
            prompt[:shared] = np.random.default_rng(seed % 2).integers(0, VOCAB, 40)[:length][
                :shared
            ]
            request = Request(
                request_id=f"r{number}",
                prompt=prompt,
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
                options=options,
            )
            self.alone[request.key] = Alone(request)
            self.live.append(scheduler.add(request))

    def check(self, length: int, copies: int) -> None:
        self.scheduler.check_prompt(length)
        self.scheduler.check_queue(copies, copies * length, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live), "aborted")
        pool = self.scheduler.cache.pool
        alone = sum(pool.references(page) == 1 for page in sequence.pages)
        available = pool.num_available
        assert self.scheduler.abort(sequence.request.request_id) is sequence
        assert sequence.finish_reason == "abort"
        assert pool.num_available == available + alone
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
            if (
                sequence.finish_reason in ("abort", "error", "timeout")
                or sequence.order in self.cut
            ):
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
        plenty = scheduler.cache.num_available >= len(crossing) + scheduler.rows.promised
        computed = {s.order: (s.num_preemptions, s.num_computed) for s in self.live}
        preempted = sum(scheduler.stats.preemptions.values())

        for sequence in scheduler.expire(self.now):
            deadline = sequence.request.deadline
            assert deadline is not None
            assert deadline <= self.now
            assert sequence.finish_reason == "timeout"
        self.settle()
        assert all(s.request.deadline is None or s.request.deadline > self.now for s in self.live)
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
        moved = {
            s.order for s in self.live if (s.num_preemptions, s.num_computed) > computed[s.order]
        }
        if not self.in_flight and self.policy == "fcfs":
            spared = any(is_protected(s) for s in scheduler.running)
            assert spared or self.live[0].order in moved, "the oldest sequence does not advance"
        if plenty and sum(scheduler.stats.preemptions.values()) == preempted:
            left = {s.order for s in decoding if s in self.live}
            assert moved >= left, "a decoding row is left out"
        assert all(s.num_preemptions <= MAX_PREEMPTIONS for s in self.live)
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
        assert self.scheduler.cache.pool.num_free == self.config.num_pages
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
        scheduler, stats = self.scheduler, self.scheduler.stats
        pool = scheduler.cache.pool
        scheduler.check_invariants()
        assert pool.num_free + pool.num_cached + pool.num_held == self.config.num_pages
        owners = [page for s in self.live for page in s.pages]
        assert pool.num_held == len(set(owners))
        if not self.config.prefix_cache:
            assert len(owners) == len(set(owners)), "a page has two owners"
        orders = [s.order for s in self.live]
        assert orders == sorted(orders)
        assert list(scheduler.sequences()) == self.live
        for sequence in self.live:
            alone = self.alone[sequence.request.key]
            alone.grow(len(sequence.tokens))
            assert sequence.tokens == alone.tokens[: len(sequence.tokens)]
            pending = sum(s is sequence for step, _ in self.in_flight for _, s in step.sampled)
            assert sequence.num_pending == pending
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
        # somebody advances in each step, or in the one after the commit that it waits for, and no
        # token is computed more often than its sequence is preempted
        self.iterate(9 * sum(s.num_prompt + s.request.max_tokens for s in self.live) + 2)
        assert not self.live, "not everything ended"
        while self.in_flight:
            self.commit()
        self.holds()
        assert self.scheduler.cache.num_available == self.config.num_pages
        assert self.scheduler.cache.host.num_held == 0
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

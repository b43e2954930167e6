"""Random traffic under pressure: what each request gets is what it gets alone, in 200 schedules.

Unlike the state machine, which shrinks, these go deep: hundreds of steps each, over pools so small
that everything happens at once. The counts at the end assert that it did.
"""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.admission import ADMISSION
from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.lengths import LENGTH_MODELS
from scheduler.policy import POLICIES
from scheduler.preemption import MAX_PREEMPTIONS, PreemptionCosts, is_protected
from scheduler.request import Request, RequestOptions, SamplingParams, Sequence, Status
from scheduler.step import Step
from tests.scheduler.device import VOCAB, Alone, Device

SCHEDULES = 200
PARTS = 8  # of the schedules, one test each


class Traffic:
    """One engine's life: arrivals, aborts, failures and steps, all drawn from one seed."""

    def __init__(self, seed: int):
        self.random = random = np.random.default_rng(seed)
        page_size = int(random.choice([1, 2, 4, 8]))
        pages = int(random.integers(24, 72)) // page_size + 2
        self.config = SchedulerConfig(
            num_pages=pages,
            page_size=page_size,
            max_num_seqs=int(random.integers(2, 9)),
            max_num_batched_tokens=int(random.integers(6, 40)),
            max_model_len=60,
            max_chunk_tokens=int(random.choice([3, 100])),
            num_host_pages=int(random.choice([0, 3, 12, 80])),
            prefix_cache=bool(random.random() < 0.7),
        )
        self.lookahead = int(random.integers(0, 3))
        self.policy = str(random.choice(["fcfs", "fcfs", "priority", *POLICIES]))
        pow2 = BUCKET_STRATEGIES["pow2"]
        lengths = LENGTH_MODELS[str(random.choice(list(LENGTH_MODELS)))]()
        self.scheduler = Scheduler(
            self.config,
            BucketGrid.build(
                rows=pow2,
                tokens=pow2,
                pages=pow2,
                max_rows=self.config.max_rows,
                max_tokens=self.config.max_num_batched_tokens,
                max_pages=self.config.max_pages_per_sequence,
            ),
            policy=POLICIES[self.policy](lengths),
            admission=ADMISSION[str(random.choice(["fits", "fits", *ADMISSION]))](lengths, 0.2),
            lengths=lengths,
            costs=PreemptionCosts(copy_base=float(random.choice([0.0, 0.0, 4.0]))),
        )
        self.device = Device(self.config)
        self.alone: dict[tuple[int, int], Alone] = {}
        self.live: list[Sequence] = []
        self.in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self.seen: Counter[str] = Counter()
        self.now = 0.0

    def arrive(self) -> None:
        random, number = self.random, len(self.alone)
        length = int(random.choice([1, 4, 7, 8, 12, 16, 24, 40]))
        length = min(length, self.config.max_tokens_per_sequence - 1)
        prompt = random.integers(0, VOCAB, length, np.int32)
        if random.random() < 0.6:  # one of two documents, or its beginning
            document = np.random.default_rng(int(random.integers(2))).integers(0, VOCAB, 40)
            shared = int(random.choice([6, 16, 40]))
            prompt[:shared] = document[:length][:shared]
        priority = int(random.integers(-1, 2)) if self.policy == "priority" else 0
        max_tokens = int(random.choice([1, 4, 20, 50]))
        request = Request(
            request_id=f"r{number}",
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.5),
            max_tokens=self.scheduler.max_output(length, max_tokens),
            arrival=self.now,
            stop_ids=frozenset({1}) if random.random() < 0.3 else frozenset(),
            key=(number, 1),
            options=RequestOptions(
                priority=priority,
                tenant=str(random.choice(["", "a"])),
                timeout=float(random.choice([0.3, 2.0])) if random.random() < 0.1 else None,
                cache_salt=str(random.choice(["", "", "", "s"])),
            ),
        )
        self.alone[request.key] = Alone(request)
        self.live.append(self.scheduler.add(request))

    def state(self, sequence: Sequence) -> str:
        if sequence.status is Status.WAITING:
            return "swapped" if sequence.claims else "waiting"
        back = {page for step, _ in self.in_flight for _, page in step.copies.back}
        if back & set(sequence.pages):
            return "loading"
        return "decoding" if sequence.num_output else "in its prompt"

    def abort(self) -> None:
        rare = [s for s in self.live if self.state(s) in ("swapped", "loading")]
        if self.random.random() > (0.3 if rare else 0.03):
            return
        choice = rare or self.live
        sequence = choice[int(self.random.integers(len(choice)))]
        self.seen[f"aborted {self.state(sequence)}"] += 1
        self.scheduler.abort(sequence.request.request_id)

    def fail(self) -> None:
        self.in_flight.clear()
        self.device.reset()
        self.scheduler.preempt_all()
        self.seen["failures"] += 1

    def plan(self) -> bool:
        self.scheduler.expire(self.now)
        self.settle()
        step = self.scheduler.schedule(self.now)
        self.scheduler.check_invariants()
        self.seen["protected"] += any(is_protected(s) for s in self.scheduler.running)
        if step is None:
            assert self.in_flight or not self.live, "requests wait, but nothing can run"
            return False
        self.in_flight.append((step, self.device.run(step, self.alone)))
        return True

    def commit(self) -> None:
        step, tokens = self.in_flight.popleft()
        self.scheduler.commit(step, SimpleNamespace(tokens=tokens), self.now)
        self.scheduler.check_invariants()
        self.settle()

    def settle(self) -> None:
        for sequence in [s for s in self.live if s.status is Status.FINISHED]:
            self.live.remove(sequence)
            assert sequence.num_preemptions <= MAX_PREEMPTIONS
            output = sequence.tokens[sequence.num_prompt :]
            expected, reason = self.alone[sequence.request.key].end()
            if sequence.finish_reason in ("stop", "length"):
                assert (output, sequence.finish_reason) == (expected, reason)
            else:
                assert output == expected[: len(output)]
                self.seen[str(sequence.finish_reason)] += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.01
            while self.random.random() < 0.25 and len(self.live) < 20:
                self.arrive()
            if self.live:
                self.abort()
            self.settle()
            if self.random.random() < 0.004:
                self.fail()
            self.iterate()
        budget = 20 * sum(s.num_prompt + s.request.max_tokens for s in self.live) + 20
        while self.live:
            budget -= 1
            assert budget > 0, "not everything ends"
            self.now += 0.01
            self.iterate()
        while self.in_flight:
            self.commit()
        cache = self.scheduler.cache
        assert (cache.pool.num_held, cache.host.num_held) == (0, 0)
        stats = self.scheduler.stats
        assert sum(stats.finished.values()) == len(self.alone)
        self.seen.update({f"preempted by {mode}": n for mode, n in stats.preemptions.items()})
        self.seen.update({f"tokens {kind}": n for kind, n in stats.prefix_tokens.items()})
        self.seen.update({f"copied {way}": n for way, n in stats.pages_copied.items()})

    def iterate(self) -> None:
        planned = len(self.in_flight) <= self.lookahead and self.plan()
        if self.in_flight and (len(self.in_flight) > self.lookahead or not planned):
            self.commit()


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("part", range(PARTS))
def test_each_request_gets_what_it_gets_alone(part: int, seen: Counter[str]) -> None:
    for seed in range(part, SCHEDULES, PARTS):
        traffic = Traffic(seed)
        traffic.run(120)
        seen.update(traffic.seen)


def test_everything_happened(seen: Counter[str]) -> None:
    least: dict[str, Any] = {
        "aborted waiting": 20,
        "aborted swapped": 5,
        "aborted loading": 5,
        "aborted in its prompt": 20,
        "aborted decoding": 20,
        "timeout": 20,
        "failures": 20,
        "protected": 50,
        "preempted by recompute": 500,
        "preempted by swap": 200,
        "tokens hit": 1000,
        "tokens hit_host": 500,
        "copied out": 500,
        "copied back": 200,
    }
    assert {name: n for name, n in least.items() if seen[name] < n} == {}, dict(seen)

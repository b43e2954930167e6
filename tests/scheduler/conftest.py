"""Small schedulers and requests for tests with exact values."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.admission import AdmissionPolicy
from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.plan import plan_layout
from scheduler.policy import QueuePolicy
from scheduler.preemption import PreemptionCosts
from scheduler.request import Request, RequestOptions, SamplingParams
from scheduler.step import Progress, Step

TOKEN = 7
LIMITS = {
    "num_pages": 64,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
    "prefix_cache": False,
}


class Driven(Scheduler):
    """A scheduler with a device that always samples the same token."""

    @staticmethod
    def rows_of(step: Step | None) -> list[tuple[int, int]]:
        """(request number, tokens) of each row."""
        assert step is not None
        view = plan_layout(step.plan.key).views(step.plan.buffer)
        count = step.plan.num_rows
        numbers, lengths = view["key"][:count, 0].tolist(), view["query_len"][:count].tolist()
        return list(zip(numbers, lengths, strict=True))

    def give(self, step: Step | None, token: int = TOKEN, now: float = 0.0) -> list[Progress]:
        """Commit a step in which every row sampled `token`."""
        assert step is not None
        tokens = np.full(step.plan.key.rows, token, np.int32)
        progress = self.commit(step, SimpleNamespace(tokens=tokens), now)
        self.check_invariants()
        return progress

    def advance(self) -> list[tuple[int, int]]:
        """One step without lookahead; its rows."""
        step = self.schedule(0.0)
        self.check_invariants()
        self.give(step)
        return self.rows_of(step)

    def finish_all(self) -> None:
        for _ in range(1000):
            if not list(self.sequences()):
                return
            self.advance()
        raise AssertionError("not everything ended")


@pytest.fixture
def make_scheduler() -> Callable[..., Driven]:
    """make_scheduler(policy, admission, costs, **limits): those that are not named come from
    LIMITS."""

    def make(
        policy: QueuePolicy | None = None,
        admission: AdmissionPolicy | None = None,
        costs: PreemptionCosts | None = None,
        **limits: Any,
    ) -> Driven:
        config = SchedulerConfig(**{**LIMITS, **limits})
        pow2 = BUCKET_STRATEGIES["pow2"]
        grid = BucketGrid.build(
            rows=pow2,
            tokens=pow2,
            pages=pow2,
            max_rows=config.max_rows,
            max_tokens=config.max_num_batched_tokens,
            max_pages=config.max_pages_per_sequence,
        )
        return Driven(config, grid, policy=policy, admission=admission, costs=costs)

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """make_request(number, prompt, max_tokens): `number` is also the row's key in a plan; a prompt
    given as a length holds the ids 100, 101, ..."""

    def make(
        number: int,
        prompt: int | list[int],
        max_tokens: int = 8,
        *,
        stop_ids: frozenset[int] = frozenset(),
        arrival: float = 0.0,
        options: RequestOptions | None = None,
        **params: Any,
    ) -> Request:
        ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
        return Request(
            request_id=str(number),
            prompt=np.asarray(ids, np.int32),
            params=SamplingParams(**{"max_tokens": max_tokens, **params}),
            max_tokens=max_tokens,
            arrival=arrival,
            stop_ids=stop_ids,
            key=(number, 0),
            options=options or RequestOptions(),
        )

    return make

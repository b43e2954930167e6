"""Small schedulers and requests for tests with exact values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.core import Scheduler, SchedulerConfig
from scheduler.request import Request, SamplingParams

LIMITS = {
    "num_pages": 64,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
}


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    """make_scheduler(**limits): those that are not named come from LIMITS."""

    def make(**limits: Any) -> Scheduler:
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
        return Scheduler(config, grid)

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
        )

    return make

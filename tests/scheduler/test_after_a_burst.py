"""Once a burst is over, nothing of it may be left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.admission import ADMISSION
from scheduler.lengths import LENGTH_MODELS
from scheduler.policy import POLICIES
from scheduler.request import Request, RequestOptions

MakeScheduler = Callable[..., Any]
MakeRequest = Callable[..., Request]


@pytest.mark.parametrize("num_host_pages", [0, 12])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("admission", ADMISSION)
def test_the_pace_after_a_burst_is_the_pace_before_it(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    admission: str,
    policy: str,
    num_host_pages: int,
) -> None:
    """sglang#26248: one retraction made decoding 14 times slower for good."""
    lengths = LENGTH_MODELS["profiled"]()
    scheduler = make_scheduler(
        POLICIES[policy](lengths),
        ADMISSION[admission](lengths, 0.2),
        num_pages=24,
        num_host_pages=num_host_pages,
    )
    scheduler.lengths = lengths
    number = 0

    def add(count: int, prompt: int, max_tokens: int) -> None:
        nonlocal number
        for i in range(count):
            options = RequestOptions(tenant=str(i % 3), priority=i % 3)
            scheduler.add(make_request(number, prompt, max_tokens, options=options))
            number += 1

    def steady() -> list[int]:
        """Rows of each step while three requests that fill the pool exactly have their turn."""
        add(3, 8, 24)
        rows = []
        while list(scheduler.sequences()):
            rows.append(len(scheduler.advance()))
        return rows

    before = steady()
    assert len(before) == 25  # 16 tokens a step: two prompts, then the third
    add(12, 9, 40)
    add(6, 30, 60)
    scheduler.finish_all()
    if admission == "fits":
        assert sum(scheduler.stats.preemptions.values()) > 5
    assert steady() == before

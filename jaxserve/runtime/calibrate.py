"""What swapping and recomputing cost on this device: measured once, at warm-up, with the programs
that will serve. scheduler.preemption weighs them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median_low
from typing import Any

import jax
import numpy as np

from jaxserve.runtime.transfer import Pools
from scheduler.plan import PlanKey, plan_layout
from scheduler.preemption import PreemptionCosts
from scheduler.tiers import PageCopies

Copy = Callable[[Pools, PageCopies], tuple[Pools, list[jax.Array]]]
REPEATS = 5
PATIENCE = 0.2  # seconds, for the repeats of one measurement


def copy_costs(copy: Copy, pools: Pools, num_pages: int) -> tuple[Pools, PreemptionCosts]:
    """Time copies of one page and of num_pages pages, out to host pages 0.. and back to where they
    came from; `prefill` is left at its default. The pools given are donated, and come back
    unchanged."""

    def measure(count: int) -> tuple[float, float]:
        out = PageCopies(out=tuple((i + 1, i) for i in range(count)))
        back = PageCopies(back=tuple((i, i + 1) for i in range(count)))

        def run(copies: PageCopies) -> Callable[[], Any]:
            def once() -> Any:
                nonlocal pools
                pools, leaving = copy(pools, copies)
                return leaving or pools

            return once

        return _seconds(run(out)), _seconds(run(back))

    single, many = measure(1), measure(num_pages)
    per_page = [seconds / num_pages for seconds in many]
    # what a call costs beyond its pages; that of full calls is in the pages' share
    base = max(0.0, *(one - page for one, page in zip(single, per_page, strict=True)))
    return pools, PreemptionCosts(base, *per_page)


def no_copies() -> PreemptionCosts:
    """Without a host tier nothing can be copied."""
    return PreemptionCosts(copy_base=math.inf, copy_out=math.inf, copy_back=math.inf)


def prefill_cost(run: Callable[[np.ndarray], Any], key: PlanKey, page_size: int) -> float:
    """Seconds a token of a full plan of this key. `run` takes the plan's buffer, and gives what
    tells that the step has ended."""
    plan, tokens = prompt_plan(key, page_size)
    return _seconds(lambda: run(plan)) / tokens


def prompt_plan(key: PlanKey, page_size: int) -> tuple[np.ndarray, int]:
    """(int32[words], its tokens): prompts that fill a mixed plan, or as much of it as rows and
    block tables allow. They read page 0, write nothing and sample for nobody."""
    layout = plan_layout(key)
    buffer = layout.blank.copy()
    view = layout.views(buffer)
    length = min(key.tokens, key.pages * page_size)
    rows = min(key.rows, key.tokens // length)
    view["query_start"][:rows] = np.arange(rows) * length
    view["query_len"][:rows] = view["context_len"][:rows] = length
    view["positions"][: rows * length] = np.tile(np.arange(length), rows)
    return buffer, rows * length


def _seconds(once: Callable[[], Any]) -> float:
    """Median time until what `once` returns is ready."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < PATIENCE:
        start = time.perf_counter()
        jax.block_until_ready(once())
        times.append(time.perf_counter() - start)
    return median_low(times)

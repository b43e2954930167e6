"""Host cost of one iteration: schedule() and commit() with many rows running and a queue waiting.

    python -m bench.scheduler_cost [--rows 256] [--steps 300]

decode: every row makes one token in each step, and nobody comes or goes. turnover: some rows end in
each step and others take their places. Both must stay under a millisecond and not grow with the
queue. There is no device: tokens are made up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import count

import numpy as np

from scheduler.admission import ADMISSION
from scheduler.buckets import BUCKET_STRATEGIES, BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler, Step
from scheduler.lengths import Profiled
from scheduler.pages import pages_for
from scheduler.request import Request, SamplingParams

PAGE_SIZE = 16
PROMPT = 32  # tokens, and up to a page more
TURNOVER = 64  # tokens of an output, and up to as many more
WAITING = (0, 1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: np.ndarray  # int32[rows]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of each step."""

    schedule: list[float]
    commit: list[float]

    def __str__(self) -> str:
        return "  ".join(
            f"{statistics.median(times):10.3f} {max(times):8.3f}"
            for times in (self.schedule, self.commit)
        )


def make_scheduler(rows: int, max_length: int, admission: str) -> Scheduler:
    config = SchedulerConfig(
        num_pages=rows * pages_for(max_length, PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * (PROMPT + PAGE_SIZE),
        max_model_len=4096,
    )
    pow2 = BUCKET_STRATEGIES["pow2"]
    grid = BucketGrid.build(
        rows=pow2,
        tokens=pow2,
        pages=pow2,
        max_rows=config.max_rows,
        max_tokens=config.max_num_batched_tokens,
        max_pages=config.max_pages_per_sequence,
    )
    lengths = Profiled()
    return Scheduler(config, grid, admission=ADMISSION[admission](lengths, 0.01), lengths=lengths)


def measure(rows: int, num_waiting: int, steps: int, turnover: bool, admission: str) -> Cost:
    """One step of lookahead, as the engine drives it."""
    longest = 2 * TURNOVER if turnover else steps + 32
    scheduler = make_scheduler(rows, PROMPT + PAGE_SIZE + longest, admission)
    params = SamplingParams(max_tokens=None, min_tokens=1)
    numbers = count()

    def add() -> None:
        number = next(numbers)
        prompt = np.arange(1, 1 + PROMPT + number % PAGE_SIZE, dtype=np.int32)
        max_tokens = TURNOVER + 37 * number % TURNOVER if turnover else longest
        scheduler.add(
            Request(str(number), prompt, params, max_tokens, 0.0, stop_ids=frozenset({0}))
        )

    for _ in range(rows + num_waiting):
        add()
    cost = Cost([], [])
    in_flight: Step | None = None
    warm_up = TURNOVER if turnover else 8
    for iteration in range(warm_up + steps):
        start = time.perf_counter()
        step = scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        if in_flight is not None:
            output = Sampled(np.ones(in_flight.plan.key.rows, np.int32))
            begin = time.perf_counter()
            scheduler.commit(in_flight, output, 0.0)
            if iteration >= warm_up:
                cost.schedule.append(1e3 * (scheduled - start))
                cost.commit.append(1e3 * (time.perf_counter() - begin))
        in_flight = step
        while len(scheduler.waiting) + len(scheduler.running) < rows + num_waiting:
            add()
    assert len(scheduler.running) >= 0.9 * rows
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of one scheduling step.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--admission", choices=ADMISSION, default="statistical")
    options = parser.parse_args()
    print(f"admission: {options.admission}")
    print(f"milliseconds a step, {options.rows} running rows, {options.steps} steps")
    print(f"{'':>18}  {'schedule':>10} {'max':>8}  {'commit':>10} {'max':>8}")
    for turnover in (False, True):
        for num_waiting in WAITING:
            cost = measure(options.rows, num_waiting, options.steps, turnover, options.admission)
            name = "turnover" if turnover else "decode"
            print(f"{name:>9} {num_waiting:>8}  {cost}", flush=True)


if __name__ == "__main__":
    main()

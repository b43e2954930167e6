"""Output tokens per second at concurrency 1, 4, 16 and 64: continuous batching against static
batching.

    uv run python bench/offline.py [--quick]

Both disciplines run on the same engine, the same compiled steps and the same requests, in turn,
several times; medians are printed. Static batching is what it is elsewhere: a batch is formed from
the next c requests, prompts are padded to the longest of the batch, every row runs until the
longest output is complete, and only then does the next batch begin. Tokens that pad are not
counted.

The ideal ratios say what the lengths alone predict: `steps` if a step costs the same whatever its
size (weights decide), `tokens` if it costs in proportion to its tokens (matrix products decide),
`reads` if in proportion to the cache that its tokens read (attention decides). What is measured
should lie among them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.workloads import Work, mixed_lengths
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.loading import load_model
from jaxserve.terminal import progress
from scheduler.request import SamplingParams

CONCURRENCIES = (1, 4, 16, 64)


class Driver:
    """Adds requests to an engine and steps it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._count = 0

    def add(self, prompt: tuple[int, ...], output_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._count += 1
        for request in self.engine.requests(
            f"bench-{self._count}", list(prompt), params, self.engine.clock()
        ):
            self.engine.add(request)

    def step(self) -> int:
        """Run one step; how many requests ended with it."""
        return sum(delta.finish_reason is not None for delta in self.engine.step())


def run_continuous(driver: Driver, works: list[Work], concurrency: int) -> None:
    """Keep `concurrency` requests in the engine until none is left."""
    waiting, running = list(reversed(works)), 0
    while waiting or running:
        while waiting and running < concurrency:
            work = waiting.pop()
            driver.add(work.prompt, work.output_tokens)
            running += 1
        running -= driver.step()


def run_static(driver: Driver, works: list[Work], concurrency: int) -> None:
    """Batches of `concurrency`, padded to their longest prompt and their longest output."""
    for batch in batches(works, concurrency):
        longest_prompt = max(len(work.prompt) for work in batch)
        longest_output = max(work.output_tokens for work in batch)
        for work in batch:
            padding = (work.prompt[0],) * (longest_prompt - len(work.prompt))
            driver.add(padding + work.prompt, longest_output)
        running = len(batch)
        while running:
            running -= driver.step()


def batches(works: list[Work], size: int) -> list[list[Work]]:
    return [works[i : i + size] for i in range(0, len(works), size)]


def cache_reads(prompt_tokens: int, output_tokens: int) -> int:
    """Tokens of cache that one request's outputs read."""
    return output_tokens * prompt_tokens + output_tokens * (output_tokens - 1) // 2


def ideal_ratios(works: list[Work], concurrency: int) -> tuple[float, float, float]:
    """Static over continuous: (steps, tokens, cache reads). Continuous: a place that becomes free
    is taken at once."""
    static_steps = static_tokens = static_reads = 0
    for batch in batches(works, concurrency):
        longest_output = max(work.output_tokens for work in batch)
        longest_prompt = max(len(work.prompt) for work in batch)
        static_steps += longest_output
        static_tokens += len(batch) * (longest_prompt + longest_output)
        static_reads += len(batch) * cache_reads(longest_prompt, longest_output)
    places = [0] * concurrency
    for work in works:
        heapq.heappush(places, heapq.heappop(places) + work.output_tokens)
    tokens = sum(len(work.prompt) + work.output_tokens for work in works)
    reads = sum(cache_reads(len(work.prompt), work.output_tokens) for work in works)
    return static_steps / max(places), static_tokens / tokens, static_reads / reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=list(CONCURRENCIES), metavar="N"
    )
    parser.add_argument("--quick", action="store_true", help="16 requests, one repeat")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    count = 16 if arguments.quick else arguments.requests
    repeats = 1 if arguments.quick else arguments.repeats
    with progress() as report:
        loaded = load_model(
            EngineConfig(
                model=arguments.model,
                dtype=arguments.dtype,
                page_size=arguments.page_size,
                max_num_seqs=max(arguments.concurrency),
            ),
            report,
        )
    works = mixed_lengths(count, vocab_size=loaded.engine.vocab_size)
    output_tokens = sum(work.output_tokens for work in works)
    driver = Driver(loaded.engine)
    disciplines: dict[str, Callable[[Driver, list[Work], int], None]] = {
        "continuous": run_continuous,
        "static": run_static,
    }
    print(
        f"{loaded.name}, {loaded.runner.dtype}, {count} requests, "
        f"{sum(len(w.prompt) for w in works)} prompt tokens, {output_tokens} output tokens, "
        f"median of {repeats}"
    )
    print(
        f"{'concurrency':>11} {'continuous':>11} {'static':>8} {'ratio':>6}   "
        f"{'ideal: steps':>12} {'tokens':>6} {'reads':>6}   (output tokens/s)"
    )
    rows: list[dict[str, float]] = []
    run_continuous(driver, works[:8], 4)  # first touch of memory and threads
    for concurrency in arguments.concurrency:
        seconds: dict[str, list[float]] = {name: [] for name in disciplines}
        for _ in range(repeats):
            for name, run in disciplines.items():
                start = time.perf_counter()
                run(driver, works, concurrency)
                seconds[name].append(time.perf_counter() - start)
        rate = {name: output_tokens / statistics.median(s) for name, s in seconds.items()}
        steps, tokens, reads = ideal_ratios(works, concurrency)
        ratio = rate["continuous"] / rate["static"]
        print(
            f"{concurrency:>11} {rate['continuous']:>11.1f} {rate['static']:>8.1f} {ratio:>6.2f}   "
            f"{steps:>12.2f} {tokens:>6.2f} {reads:>6.2f}",
            flush=True,
        )
        rows.append(
            {
                "concurrency": concurrency,
                **rate,
                "ratio": ratio,
                "ideal_steps": steps,
                "ideal_tokens": tokens,
                "ideal_reads": reads,
            }
        )
    loaded.engine.scheduler.check_invariants()
    assert loaded.stats.compilations["serving"] == 0
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Counters, gauges and histograms of one engine. Plain numbers; how they are exported is the
server's business."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

TTFT_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """Fixed bounds, in seconds; `counts` is per bucket (not cumulative), with one more for the
    overflow."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _zeros(*names: str) -> Counter[str]:
    return Counter(dict.fromkeys(names, 0))


@dataclass(slots=True)
class Stats:
    """Written by the engine's thread only; a reader on another thread sees each number whole."""

    num_running: int = 0
    num_waiting: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    pages_reserved: int = 0  # set aside for the growth of running sequences
    queue_tokens: int = 0  # tokens of waiting sequences
    recomputed_tokens: int = 0  # computed before a preemption, and once more after it
    host_pages: Counter[str] = field(default_factory=lambda: _zeros("free", "cached", "held"))
    pages_copied: Counter[str] = field(default_factory=lambda: _zeros("out", "back"))
    prefix_tokens: Counter[str] = field(
        default_factory=lambda: _zeros("queried", "hit", "hit_host")
    )
    requests_refused: Counter[str] = field(
        default_factory=lambda: _zeros("requests", "tokens", "wait")
    )
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    preemptions: Counter[str] = field(default_factory=lambda: _zeros("recompute", "swap"))
    compilations: Counter[str] = field(default_factory=lambda: _zeros("warmup", "serving"))
    plan_tokens: Counter[str] = field(default_factory=lambda: _zeros("real", "padded"))
    finished: Counter[str] = field(
        default_factory=lambda: _zeros("stop", "length", "abort", "error", "timeout")
    )
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))

"""The engine's plain counters as Prometheus metrics, read at scrape time. No globals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from jaxserve.server.client import HistogramLike, StatsSnapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    def __init__(self, stats: Callable[[], StatsSnapshot]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        yield _gauge("num_requests_running", "Sequences that take part in steps.", s.num_running)
        yield _gauge("num_requests_waiting", "Sequences in the queue.", s.num_waiting)
        yield _gauge("queue_tokens", "Tokens of the sequences in the queue.", s.queue_tokens)
        yield _counters("requests_refused", "Requests refused.", "limit", s.requests_refused)
        pages = {"free": s.pages_free, "cached": s.pages_cached, "held": s.pages_held}
        yield _gauges("kv_pages", "KV pages by state.", "state", pages)
        yield _gauge(
            "kv_pages_reserved", "KV pages set aside for tokens still to come.", s.pages_reserved
        )
        yield _gauges("host_kv_pages", "KV pages in host memory by state.", "state", s.host_pages)
        yield _counters(
            "pages_copied",
            "KV pages copied out to the host, and back.",
            "direction",
            s.pages_copied,
        )
        yield _counter(
            "prompt_tokens", "Prompt tokens of queued requests, once per choice.", s.prompt_tokens
        )
        yield _counter("generation_tokens", "Tokens generated.", s.generation_tokens)
        yield _counters(
            "prefix_tokens",
            "Prompt tokens looked up in the prefix cache, and those found there.",
            "kind",
            s.prefix_tokens,
        )
        yield _counter(
            "recomputed_tokens", "Tokens computed again after a preemption.", s.recomputed_tokens
        )
        yield _counters("preemptions", "Sequences preempted.", "mode", s.preemptions)
        yield _counters("compilations", "XLA compilations.", "phase", s.compilations)
        yield _counters("plan_tokens", "Tokens in batch plans.", "kind", s.plan_tokens)
        yield _counters("request_finished", "Sequences that ended.", "reason", s.finished)
        yield _histogram(
            "time_to_first_token_seconds", "From arrival to first token.", s.time_to_first_token
        )
        yield _histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence.", s.inter_token_latency
        )


def make_registry(stats: Callable[[], StatsSnapshot]) -> CollectorRegistry:
    """A registry of its own, so that two servers can live in one process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(stats))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"jaxserve_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"jaxserve_{name}", text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"jaxserve_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"jaxserve_{name}", text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: HistogramLike) -> HistogramMetricFamily:
    names = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(names, accumulate(list(histogram.counts)), strict=True))
    return HistogramMetricFamily(f"jaxserve_{name}", text, buckets=buckets, sum_value=histogram.sum)

"""/metrics: names, labels, and numbers that agree with the engine's."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.server.metrics import make_registry, render
from scheduler.stats import Stats


@pytest.fixture
def stats():
    stats = Stats(
        num_running=3,
        num_waiting=2,
        pages_free=10,
        pages_cached=4,
        pages_held=6,
        prompt_tokens=100,
        generation_tokens=50,
        pages_reserved=5,
        queue_tokens=300,
        recomputed_tokens=17,
    )
    stats.prefix_tokens.update(queried=80, hit=48, hit_host=16)
    stats.host_pages.update(free=20, cached=8, held=2)
    stats.pages_copied.update(out=31, back=30)
    stats.requests_refused.update(requests=4, tokens=2, wait=1)
    stats.preemptions["swap"] = 9
    stats.finished["timeout"] = 6
    stats.preemptions["recompute"] = 7
    stats.compilations["warmup"] = 12
    stats.plan_tokens["real"] = 90
    stats.plan_tokens["padded"] = 38
    stats.finished["stop"] = 5
    stats.finished["abort"] = 1
    for seconds in (0.005, 0.03, 0.03, 500.0):
        stats.time_to_first_token.observe(seconds)
    stats.inter_token_latency.observe(0.004)
    return stats


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_by_name(stats):
    values = samples(render(make_registry(lambda: stats)).decode())
    assert values[("jaxserve_num_requests_running",)] == 3
    assert values[("jaxserve_num_requests_waiting",)] == 2
    assert values[("jaxserve_kv_pages", ("state", "free"))] == 10
    assert values[("jaxserve_kv_pages", ("state", "cached"))] == 4
    assert values[("jaxserve_kv_pages", ("state", "held"))] == 6
    assert values[("jaxserve_prompt_tokens_total",)] == 100
    assert values[("jaxserve_generation_tokens_total",)] == 50
    assert values[("jaxserve_preemptions_total", ("mode", "recompute"))] == 7
    assert values[("jaxserve_compilations_total", ("phase", "warmup"))] == 12
    assert values[("jaxserve_compilations_total", ("phase", "serving"))] == 0
    assert values[("jaxserve_plan_tokens_total", ("kind", "real"))] == 90
    assert values[("jaxserve_plan_tokens_total", ("kind", "padded"))] == 38
    assert values[("jaxserve_request_finished_total", ("reason", "stop"))] == 5
    assert values[("jaxserve_request_finished_total", ("reason", "abort"))] == 1
    assert values[("jaxserve_request_finished_total", ("reason", "length"))] == 0


def test_every_metric_of_pressure_by_name(stats):
    values = samples(render(make_registry(lambda: stats)).decode())
    labelled = {
        "prefix_tokens_total": ("kind", {"queried": 80, "hit": 48, "hit_host": 16}),
        "host_kv_pages": ("state", {"free": 20, "cached": 8, "held": 2}),
        "pages_copied_total": ("direction", {"out": 31, "back": 30}),
        "requests_refused_total": ("limit", {"requests": 4, "tokens": 2, "wait": 1}),
        "preemptions_total": ("mode", {"recompute": 7, "swap": 9}),
    }
    for name, (label, expected) in labelled.items():
        got = {key[1][1]: value for key, value in values.items() if key[0] == f"jaxserve_{name}"}
        assert got == expected
        assert ("jaxserve_" + name, (label, next(iter(expected)))) in values
    assert values[("jaxserve_recomputed_tokens_total",)] == 17
    assert values[("jaxserve_kv_pages_reserved",)] == 5
    assert values[("jaxserve_queue_tokens",)] == 300
    assert values[("jaxserve_request_finished_total", ("reason", "timeout"))] == 6


def test_histograms_are_cumulative(stats):
    values = samples(render(make_registry(lambda: stats)).decode())
    name = "jaxserve_time_to_first_token_seconds"
    assert values[(name + "_bucket", ("le", "0.01"))] == 1
    assert values[(name + "_bucket", ("le", "0.02"))] == 1
    assert values[(name + "_bucket", ("le", "0.05"))] == 3
    assert values[(name + "_bucket", ("le", "120.0"))] == 3
    assert values[(name + "_bucket", ("le", "+Inf"))] == 4
    assert values[(name + "_count",)] == 4
    assert values[(name + "_sum",)] == pytest.approx(500.065)
    assert values[("jaxserve_inter_token_latency_seconds_count",)] == 1


def test_two_registries_live_side_by_side(stats):
    first, second = make_registry(lambda: stats), make_registry(Stats)
    assert samples(render(first).decode())[("jaxserve_num_requests_running",)] == 3
    assert samples(render(second).decode())[("jaxserve_num_requests_running",)] == 0


async def test_the_endpoint(start, fake, stats):
    running = await start(fake(current="loading", numbers=stats))
    async with running.http.get(running.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        assert samples(await response.text())[("jaxserve_num_requests_running",)] == 3

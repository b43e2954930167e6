"""The simulator: exact times on tiny traces, conservation, determinism, lookahead, refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from scheduler.arrivals import Independent, Lognormal, gamma_arrivals, generate
from scheduler.buckets import BucketGrid, Pow2
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.preemption import PreemptionCosts
from scheduler.report import Report, Slo
from scheduler.simulator import ENDINGS, Outcome, Simulator, unloaded_ttft
from scheduler.steptime import KindTimes, SamplerTimes, StepTimeModel
from scheduler.workload import Trace

LIMITS = {
    "num_pages": 64,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
    "prefix_cache": False,
}
# a step with a prompt in it takes two seconds, any other one
TIMES = StepTimeModel(decode=KindTimes(step=1.0), mixed=KindTimes(step=2.0))


def make_scheduler(costs: PreemptionCosts | None = None, **limits: Any) -> Scheduler:
    config = SchedulerConfig(**{**LIMITS, **limits})
    grid = BucketGrid.build(
        rows=Pow2(),
        tokens=Pow2(),
        pages=Pow2(),
        max_rows=config.max_rows,
        max_tokens=config.max_tokens,
        max_pages=config.max_pages_per_sequence,
    )
    return Scheduler(config, grid, costs=costs)


def make_trace(*requests: tuple[float, int, int], **arrays: Any) -> Trace:
    """(arrival, prompt tokens, output tokens) each."""
    arrival, prompt, output = map(np.array, zip(*requests, strict=True))
    arrays = {name: np.array(values) for name, values in arrays.items()}
    return Trace(arrival.astype(float), prompt, output, **arrays)


def run(
    trace: Trace, times: StepTimeModel = TIMES, *, lookahead: bool = True, **limits: Any
) -> Outcome:
    outcome = Simulator(make_scheduler(**limits), trace, times, lookahead=lookahead).run()
    return outcome


def endings(outcome: Outcome) -> list[str]:
    return [ENDINGS[code] for code in outcome.ending.tolist()]


TWO = make_trace((0.0, 6, 3), (2.5, 5, 2))


def test_two_requests_without_lookahead():
    """Steps: A's prompt 0-2, A 2-3, A and B's prompt 3-5, B 5-6."""
    outcome = run(TWO, lookahead=False)
    assert outcome.first_at.tolist() == [2, 5]
    assert outcome.last_at.tolist() == [5, 6]
    assert outcome.made.tolist() == [3, 2]
    assert outcome.end == 6
    assert outcome.stats.steps == 4
    assert endings(outcome) == ["stop", "stop"]


def test_two_requests_with_lookahead():
    """Steps: A's prompt 0-2, A 2-3, A 3-4 (planned at 2, before B), an extra row of A and B's
    prompt 4-6 (planned at 3), B 6-7, an extra row of B 7-8. Extra rows are thrown away."""
    outcome = run(TWO, lookahead=True)
    assert outcome.first_at.tolist() == [2, 6]
    assert outcome.last_at.tolist() == [4, 7]
    assert outcome.made.tolist() == [3, 2]
    assert outcome.end == 8
    assert outcome.stats.steps == 6


def test_host_time_hides_behind_the_step_in_flight_only_with_lookahead():
    times = StepTimeModel(TIMES.decode, TIMES.mixed, host=0.5)
    one = make_trace((1.0, 6, 3))
    # the prompt's step begins at 1.5; later ones were planned while it ran
    ahead = run(one, times, lookahead=True)
    assert (ahead.first_at.item(), ahead.last_at.item()) == (3.5, 5.5)
    behind = run(one, times, lookahead=False)
    assert (behind.first_at.item(), behind.last_at.item()) == (3.5, 6.5)


def test_a_device_faster_than_the_host_waits_for_it():
    times = StepTimeModel(KindTimes(step=0.125), KindTimes(step=0.125), host=1.0)
    outcome = run(make_trace((0.0, 6, 5)), times)
    assert outcome.first_at.item() == 1.125 + 0.875  # known when the next step is planned
    assert (outcome.last_at - outcome.first_at).item() == 4.0


def test_steps_cost_by_their_bucket_and_their_load():
    """One prompt of 20 tokens: chunks of 16 and 4 (bucket 16), then tokens at contexts 21, 22."""
    times = StepTimeModel(
        decode=KindTimes(token=1.0, read=0.01), mixed=KindTimes(token=0.1, product=0.001)
    )
    outcome = run(make_trace((0.0, 20, 3)), times, lookahead=False)
    first = 1.6 + 0.001 * sum(range(1, 17)) + 1.6 + 0.001 * sum(range(17, 21))
    assert outcome.first_at.item() == pytest.approx(first)
    assert outcome.unloaded.item() == pytest.approx(first)
    assert outcome.last_at.item() == pytest.approx(first + 1.21 + 1.22)


def test_the_sampler_runs_when_requests_draw_at_random():
    times = StepTimeModel(TIMES.decode, TIMES.mixed, sampler=SamplerTimes(sampled=0.25))
    trace = make_trace((0.0, 6, 3))
    for temperature, last in ((0.0, 4.0), (1.0, 4.75)):
        simulator = Simulator(
            make_scheduler(), trace, times, lookahead=False, temperature=temperature
        )
        assert simulator.run().last_at.item() == last


def test_what_is_declared_ends_an_output():
    trace = make_trace((0.0, 4, 50), (0.0, 4, 3), (0.0, 4, 50), max_tokens=[7, 7, 0])
    outcome = Simulator(make_scheduler(), trace, TIMES, max_tokens=9).run()
    assert outcome.made.tolist() == [7, 3, 9]
    assert endings(outcome) == ["length", "stop", "length"]


def test_the_queue_refuses_as_the_server_does():
    """One runs, two wait, and what comes at the same time finds the queue full."""
    trace = make_trace(*[(0.0, 4, 2)] * 10, (100.0, 4, 2))
    outcome = run(trace, max_num_seqs=1, max_waiting=2)
    assert endings(outcome) == ["stop"] * 3 + ["refused"] * 7 + ["stop"]
    assert outcome.made.tolist() == [2] * 3 + [0] * 7 + [2]
    assert outcome.stats.requests_refused["requests"] == 7


def test_a_prompt_that_can_never_run_is_counted_apart():
    outcome = run(make_trace((0.0, 100, 2), (0.0, 99, 2), (0.0, 4, 2)))
    assert endings(outcome) == ["unservable", "length", "stop"]
    assert outcome.made.tolist() == [0, 1, 2]


def test_deadlines_end_waiting_and_running_requests():
    trace = make_trace((0.0, 4, 10), (0.0, 4, 10), timeout=[4.5, 3.0])
    outcome = run(trace, lookahead=False, max_num_seqs=1)
    # A's tokens come at 2, 3, 4, 5; its deadline is seen when the next step is planned
    assert endings(outcome) == ["timeout", "timeout"]
    assert outcome.made.tolist() == [4, 0]
    assert np.isnan(outcome.first_at[1])
    assert outcome.end == 5


def load(count: int = 300, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    lengths = Independent(Lognormal(12, 0.8, 1, 60), Lognormal(10, 0.8, 1, 35))
    return generate(rng, gamma_arrivals(rng, 0.35, 2.0, count=count), lengths)


@pytest.mark.parametrize("lookahead", [True, False])
def test_every_request_ends_once_with_the_traces_tokens(lookahead: bool):
    """A pool that holds about two of them, so that many are preempted and computed again."""
    trace = load()
    outcome = run(trace, lookahead=lookahead, num_pages=25)
    assert outcome.stats.preemptions["recompute"] > 10
    assert outcome.preempted.sum() == outcome.stats.preemptions["recompute"]
    assert endings(outcome) == ["stop"] * len(trace)
    assert np.array_equal(outcome.made, trace.output_tokens)
    assert outcome.stats.generation_tokens == trace.output_tokens.sum()
    assert outcome.gaps.counts.sum() == (trace.output_tokens - 1).sum()
    assert (outcome.first_at > trace.arrival).all()
    assert (outcome.stats.pages_held, outcome.stats.num_running, outcome.stats.num_waiting) == (
        0,
        0,
        0,
    )


def test_the_same_load_gives_the_same_figures():
    reports = [
        Report.of([run(load(seed=seed), num_pages=25)], Slo(20.0, 2.0)).to_dict()
        for seed in (5, 5, 6)
    ]
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]
    json.dumps(reports[0], allow_nan=False)


def test_requests_with_one_prefix_share_its_pages():
    requests = [(10.0 * i, 14, 3) for i in range(4)]
    shared = make_trace(*requests, prefix=[0, 0, 1, 0], prefix_tokens=[8, 8, 8, 4])
    outcome = run(shared, prefix_cache=True)
    assert outcome.stats.prefix_tokens["hit"] == 8 + 4
    assert run(make_trace(*requests), prefix_cache=True).stats.prefix_tokens["hit"] == 0


def test_page_copies_take_their_time():
    """Without lookahead and with all arrivals at once, time changes no decision: each copied page
    adds exactly its cost."""
    trace = make_trace(*[(0.0, 10, 20)] * 6)
    cheap = PreemptionCosts(copy_base=0, copy_out=0, copy_back=0, prefill=1.0)
    costly = StepTimeModel(TIMES.decode, TIMES.mixed, costs=PreemptionCosts(0.0, 8.0, 64.0, 1.0))
    limits = {"num_pages": 12, "num_host_pages": 32, "costs": cheap, "lookahead": False}
    free, paid = run(trace, **limits), run(trace, costly, **limits)
    copied = paid.stats.pages_copied
    assert copied["out"] > 0
    assert copied["back"] > 0
    assert paid.end - free.end == 8 * copied["out"] + 64 * copied["back"]
    assert paid.stats.preemptions["swap"] > 0


def test_unloaded_is_what_a_prompt_takes_alone():
    times = StepTimeModel(TIMES.decode, TIMES.mixed, host=0.25)
    prompts = np.array([5, 16, 17, 40, 5])
    expected = [2.25, 2.25, 4.25, 6.25, 2.25]
    assert unloaded_ttft(prompts, make_scheduler(), times).tolist() == expected

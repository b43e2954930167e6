"""Figures of a simulation: the SLO, percentiles in bounded memory, series, how many engines."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from scheduler.report import GapHistogram, PoolSeries, Report, Slo, engines_needed
from scheduler.simulator import ENDINGS, Outcome
from scheduler.stats import Stats

STOP, REFUSED, TIMEOUT = (ENDINGS.index(name) for name in ("stop", "refused", "timeout"))


def make_outcome(**changes: object) -> Outcome:
    """Four requests: one within the SLO of the tests, one too late, one too slow, one refused."""
    gaps = GapHistogram()
    gaps.add(np.array([0.1] * 9 + [0.2] * 9 + [0.5] * 9))
    series = PoolSeries(every=1.0)
    stats = Stats(steps=30, prompt_tokens=40, recomputed_tokens=5)
    stats.plan_tokens["real"] = 100
    stats.preemptions["swap"] = 2
    stats.pages_held, stats.num_running = 7, 3
    series.sample(1.0, stats)
    outcome = Outcome(
        arrival=np.array([1.0, 2.0, 3.0, 4.0]),
        first_at=np.array([1.5, 4.5, 3.5, math.nan]),
        last_at=np.array([2.4, 6.3, 8.0, math.nan]),
        made=np.array([10, 10, 10, 0]),
        ending=np.array([STOP, STOP, STOP, REFUSED], np.int8),
        preempted=np.array([0, 2, 0, 0], np.int16),
        unloaded=np.array([0.2, 0.2, 0.2, 0.2]),
        gaps=gaps,
        series=series,
        stats=stats,
        num_pages=10,
        end=11.0,
    )
    return dataclasses.replace(outcome, **changes)


def test_goodput_counts_the_tokens_of_requests_within_the_slo():
    report = Report.of([make_outcome()], Slo(ttft=1.0, per_token=0.2))
    assert report.seconds == 10.0
    assert report.output_tokens == 30
    assert report.throughput == pytest.approx(3.0)
    assert report.goodput == pytest.approx(1.0)
    assert report.attainment == 0.25
    assert report.endings["refused"] == 1
    assert report.ttft == (0.5, pytest.approx(2.1), pytest.approx(2.46), 2.5)
    assert report.recomputed_share == 0.05
    assert report.most_preemptions == 2
    assert report.preemptions == {"recompute": 0, "swap": 2}


def test_the_slo_may_be_relative_to_an_idle_engine():
    outcome = make_outcome()
    assert Slo(1.0, 0.2).met(outcome).tolist() == [True, False, False, False]
    assert Slo(1.0, 0.2, ttft_factor=12.5).met(outcome).tolist() == [True, True, False, False]
    assert Slo(1.0, 0.5, ttft_factor=12.4).met(outcome).tolist() == [True, False, True, False]


def test_a_request_that_its_deadline_ended_is_not_within_the_slo():
    ending = np.array([TIMEOUT, STOP, STOP, REFUSED], np.int8)
    assert not Slo(9.0, 0.2).met(make_outcome(ending=ending))[0]


def test_one_token_has_no_time_per_token():
    outcome = make_outcome(made=np.array([1, 1, 1, 0]), last_at=np.array([1.5, 4.5, 3.5, math.nan]))
    assert Slo(1.0, 0.0).met(outcome).tolist() == [True, False, True, False]


def test_engines_add_up():
    one, both = make_outcome(), Report.of([make_outcome(), make_outcome()], Slo(1.0, 0.2))
    single = Report.of([one], Slo(1.0, 0.2))
    assert both.goodput == pytest.approx(2 * single.goodput)
    assert both.attainment == single.attainment
    assert (both.engines, both.requests, both.num_pages) == (2, 8, 20)
    assert both.series[0].held == both.series[-1].held == 14
    assert both.inter_token == single.inter_token


def test_gap_percentiles_are_within_a_bin_of_the_exact_ones():
    rng = np.random.default_rng(0)
    gaps = rng.lognormal(-3, 1, 100_000)
    histogram = GapHistogram()
    for part in np.array_split(gaps, 10):
        histogram.add(part)
    found = histogram.percentiles()
    exact = np.percentile(gaps, (50, 90, 99, 100))
    assert np.abs(np.array(found) / exact - 1).max() < 0.012
    assert found.most == gaps.max()
    assert all(math.isnan(value) for value in GapHistogram().percentiles())


def test_gaps_out_of_range_are_kept_in_the_outermost_bins():
    histogram = GapHistogram()
    histogram.add(np.array([0.0, 1e9]))
    assert histogram.counts.sum() == 2
    assert histogram.percentiles().most == 1e9


def test_samples_stay_bounded_and_cover_the_whole_time():
    series, stats = PoolSeries(every=1.0), Stats()
    for second in range(20_000):
        stats.pages_held = second
        series.sample(float(second), stats)
    assert len(series.samples) <= PoolSeries.MOST
    assert series.samples[0].at == 0
    assert series.samples[-1].at > 19_980
    times = np.array([-1.0, 0.0, 7.9, 1e6])
    held = series.at(times)[:, 0].tolist()
    assert held[:2] == [0, 0]
    assert held[2] <= 7
    assert held[3] == series.samples[-1].held


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 100])
def test_the_smallest_number_of_engines_is_found(needed: int):
    base = Report.of([make_outcome()], Slo())

    def attain(count: int) -> Report:
        return dataclasses.replace(base, attainment=min(1.0, count / needed))

    count, reports = engines_needed(attain, 1.0, most=128)
    assert count == needed
    assert reports[needed].attainment == 1.0
    assert len(reports) <= 16


def test_an_slo_out_of_reach_is_said():
    base = Report.of([make_outcome()], Slo())
    count, reports = engines_needed(lambda count: base, 0.99, most=5)
    assert count is None
    assert sorted(reports) == [1, 2, 4, 5]

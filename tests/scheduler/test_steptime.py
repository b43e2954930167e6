"""Step times: what a plan's load is, exact seconds, the file, and the fit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from scheduler.plan import PlanKey
from scheduler.preemption import PreemptionCosts
from scheduler.request import Request, SamplingParams, Sequence
from scheduler.slots import SlotTable
from scheduler.steptime import (
    KindTimes,
    Load,
    Measurement,
    SamplerTimes,
    StepTimeError,
    StepTimeModel,
    fit_kind,
    fit_sampler,
    load_of,
    load_of_chunk,
    non_negative_fit,
)

DECODE = PlanKey("decode", 4, 4, 8)
MIXED = PlanKey("mixed", 16, 4, 8)


def filled(key: PlanKey, parts: list[tuple[int, int, float]], use_sampler: bool = False) -> Load:
    """The load of a plan whose rows have (tokens, context, temperature)."""
    table, rows = SlotTable(4, 8, 4), []
    for number, (length, context, temperature) in enumerate(parts):
        prompt = np.ones(context, np.int32)
        params = SamplingParams(temperature=temperature)
        row = Sequence(Request(str(number), prompt, params, 1, 0.0), prompt.tolist(), number)
        row.num_computed = context - length
        table.enter(row)
        rows.append((row, length))
    single = np.array([row.slot for row, length in rows if length == 1], np.int32)
    chunks = [(row, length) for row, length in rows if length > 1]
    return load_of(table.fill_plan(key, single, chunks), use_sampler)


def test_single_tokens_read_their_whole_context_and_padding_reads_nothing():
    assert filled(DECODE, [(1, 5, 0.0), (1, 11, 0.0)]) == Load(reads=16, products=0, sampled=None)


def test_a_chunk_counts_the_pairs_of_its_tokens_and_what_each_sees():
    # tokens at contexts 3, 4, 5 and, of a fresh prompt, 1, 2; one single token reads 7
    load = filled(MIXED, [(1, 7, 0.0), (3, 5, 0.0), (2, 2, 0.0)])
    assert load == Load(reads=7, products=3 + 4 + 5 + 1 + 2)
    assert load_of_chunk(3, 5) == Load(products=12)
    assert load_of_chunk(1, 5) == Load(reads=5)


def test_only_rows_that_draw_at_random_count_for_the_sampler():
    assert filled(DECODE, [(1, 5, 0.7), (1, 5, 0.0), (1, 5, 1.0)], use_sampler=True).sampled == 2


def test_seconds_are_the_sum_of_the_parts():
    model = StepTimeModel(
        decode=KindTimes(step=1.0, token=0.1, row=0.01, page=0.001, read=1e-4, product=5.0),
        mixed=KindTimes(step=2.0, token=0.5, product=1e-3),
        sampler=SamplerTimes(step=10.0, row=1.0, sampled=0.5),
        costs=PreemptionCosts(copy_base=1.0, copy_out=0.1, copy_back=0.2),
    )
    decode = 1.0 + 0.4 + 0.04 + 0.032 + 0.002
    assert model.seconds(DECODE, Load(reads=20)) == pytest.approx(decode)
    assert model.seconds(DECODE, Load(20, 0, 0)) == pytest.approx(decode + 14.0)
    assert model.seconds(DECODE, Load(20, 0, 3)) == pytest.approx(decode + 15.5)
    assert model.seconds(MIXED, Load(reads=9, products=100)) == pytest.approx(10.1)
    assert model.copy_seconds(0, 0) == 0
    assert model.copy_seconds(3, 0) == pytest.approx(1.3)
    assert model.copy_seconds(3, 2) == pytest.approx(2.7)


def test_copies_that_an_engine_cannot_make_cost_nothing_when_there_are_none(tmp_path: Path):
    never = PreemptionCosts(copy_base=math.inf, copy_out=math.inf, copy_back=math.inf)
    path = tmp_path / "times.toml"
    path.write_text(StepTimeModel(KindTimes(), KindTimes(), costs=never).to_toml())
    model = StepTimeModel.load(path)
    assert model.costs == never
    assert model.copy_seconds(0, 0) == 0


def test_the_file_round_trips(tmp_path: Path):
    model = StepTimeModel(
        decode=KindTimes(step=0.0123, read=1.5e-7),
        mixed=KindTimes(token=0.25),
        sampler=SamplerTimes(sampled=0.001),
        costs=PreemptionCosts(copy_base=1e-3, copy_out=2e-3, copy_back=3e-3, prefill=4e-4),
        host=0.002,
        platform="gpu",
        engine={"num_pages": 64, "page_buckets": "pow2", "lookahead": False},
    )
    path = tmp_path / "times.toml"
    path.write_text(model.to_toml("two\nlines"), encoding="utf-8")
    assert path.read_text(encoding="utf-8").startswith("# two\n# lines\n")
    assert StepTimeModel.load(path) == model


def test_a_file_written_by_hand_needs_little(tmp_path: Path):
    path = tmp_path / "times.toml"
    path.write_text("decode.step = 0.02\nmixed = {step = 0.03, token = 0.001}\n", encoding="utf-8")
    model = StepTimeModel.load(path)
    assert model.seconds(DECODE, Load()) == 0.02
    assert model.seconds(MIXED, Load()) == pytest.approx(0.046)
    assert model.host == 0
    assert model.engine == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("decode.step = 1", "mixed"),
        ("decode.step = 1\nmixed.steps = 1", "mixed.steps"),
        ("decode.step = 1\nmixed.step = -1", "mixed.step"),
        ("decode.step = nan\nmixed.step = 1", "decode.step"),
        ("decode.step = true\nmixed.step = 1", "decode.step"),
        ("decode = 3\nmixed.step = 1", "decode"),
        ("decode.step = 1\nmixed.step = 1\nhosts = 1", "hosts"),
        ("decode.step = 1\nmixed.step = 1\nplatform = 1", "platform"),
        ("decode.step = 1\nmixed.step = 1\ncosts.copy_in = 1", "costs.copy_in"),
        ("decode.step = 1\nmixed.step = 1\nengine = 1", "engine"),
    ],
)
def test_a_bad_file_names_the_field(tmp_path: Path, text: str, name: str):
    path = tmp_path / "times.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StepTimeError) as error:
        StepTimeModel.load(path)
    assert error.value.name == name


def test_a_file_that_is_not_toml_names_itself(tmp_path: Path):
    path = tmp_path / "times.toml"
    path.write_bytes(b"decode = [\xff")
    with pytest.raises(StepTimeError, match=r"times\.toml: is not valid TOML"):
        StepTimeModel.load(path)


def test_the_fit_finds_the_coefficients_that_made_the_measurements():
    true = KindTimes(step=0.02, token=4e-4, read=1e-6, product=2e-8)
    rng = np.random.default_rng(0)
    measured = []
    for tokens in (32, 64, 128, 256):
        for reads in (0, 1000, 20000):
            key = PlanKey("mixed", tokens, min(tokens, 64), 128)
            load = Load(reads, tokens * int(rng.integers(tokens, 2048)))
            measured.append(Measurement(key, load, true.seconds(key, load)))
    found = fit_kind(measured)
    assert np.abs(found.errors).max() < 1e-9
    for name in ("step", "token", "row", "page", "read", "product"):
        assert getattr(found.times, name) == pytest.approx(getattr(true, name), abs=1e-12)


def test_columns_that_say_the_same_do_not_share_a_cost():
    """Decode plans have as many rows as tokens, and with one width of tables as many entries."""
    measured = [
        Measurement(PlanKey("decode", n, n, 128), Load(reads=r), 0.01 + 1e-3 * n + 1e-6 * r)
        for n in (2, 4, 8, 16)
        for r in (100, 5000)
    ]
    times = fit_kind(measured).times
    assert times.token == pytest.approx(1e-3)
    assert times.row == times.page == 0


def test_no_coefficient_is_negative_and_the_error_is_relative():
    units = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = non_negative_fit(units, np.array([3.0, 2.0, 1.0]))
    assert falling.tolist() == pytest.approx([2.0, 0.0])
    # one number for 1 and 10: nearer to the smaller, whose error counts ten times as much
    found = fit_kind([Measurement(DECODE, Load(), 1.0), Measurement(DECODE, Load(), 10.0)])
    constant = (1 + 1 / 10) / (1 + 1 / 100)
    assert found.times.step == pytest.approx(constant)
    assert found.errors.tolist() == pytest.approx([constant - 1, constant / 10 - 1])


def test_the_sampler_is_fitted_from_what_it_adds():
    true = SamplerTimes(step=0.001, row=1e-5, sampled=2e-4)
    measured = [
        Measurement(
            PlanKey("decode", n, n, 8),
            Load(sampled=k),
            true.seconds(PlanKey("decode", n, n, 8), Load(sampled=k)),
        )
        for n in (2, 8, 64)
        for k in (1, n)
    ]
    found = fit_sampler(measured)
    assert found.times.sampled == pytest.approx(2e-4)
    assert np.abs(found.errors).max() < 1e-9


def test_the_samplers_errors_are_relative_to_the_whole_step():
    """So that noise in a small difference of two long steps weighs little, negative or not."""
    measured = [
        Measurement(DECODE, Load(sampled=1), 0.010, whole=0.1),
        Measurement(DECODE, Load(sampled=1), -0.5, whole=100.0),
    ]
    found = fit_sampler(measured)
    assert found.times.step == pytest.approx(0.01, rel=1e-3)
    assert found.errors.tolist() == pytest.approx([0.0, 0.0051], abs=1e-5)


def test_nothing_measured_costs_nothing():
    assert fit_sampler([]).times == SamplerTimes()

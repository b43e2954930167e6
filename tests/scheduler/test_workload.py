"""Traces: the CSV format and its errors, made-up token ids, generated arrivals and lengths."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from scheduler.arrivals import (
    Independent,
    Lognormal,
    Phase,
    Resampled,
    gamma_arrivals,
    generate,
)
from scheduler.request import RequestOptions, SamplingParams
from scheduler.workload import END, Trace, TraceError, parse_trace, read_trace

PARAMS = SamplingParams(max_tokens=None)


def parse(text: str, *, arrivals: bool = True) -> Trace:
    return parse_trace(io.StringIO(text), arrivals=arrivals)


def test_the_three_columns_of_the_public_azure_traces_suffice(tmp_path: Path):
    path = tmp_path / "azure_conv.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.0000,374,44\n4.3146,396,109\n")
    trace = read_trace(path)
    assert trace.arrival.tolist() == [0.0, 4.3146]
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.span == 4.3146
    assert trace.options(1) == RequestOptions()


def test_every_column():
    trace = parse(
        "tenant,arrival_s,prompt_tokens,output_tokens,max_tokens,priority,timeout_s,prefix_id,"
        "prefix_tokens,note\n"
        "b,2,30,5,8,-1,2.5,sys,16,x\n"
        ",1,20,4,,,,,,y\n"
    )
    assert trace.arrival.tolist() == [1, 2]  # in order of arrival
    assert trace.max_tokens.tolist() == [0, 8]
    assert trace.prefix.tolist() == [-1, 0]
    assert trace.prefix_tokens.tolist() == [0, 16]
    assert trace.options(0) == RequestOptions()
    assert trace.options(1) == RequestOptions(priority=-1, tenant="b", timeout=2.5)
    assert trace.unused == ("note",)


def test_milliseconds_and_equal_times_keep_their_order():
    trace = parse("arrival_ms,prompt_tokens,output_tokens\n500,1,1\n250,2,1\n500,3,1\n")
    assert trace.arrival.tolist() == [0.25, 0.5, 0.5]
    assert trace.prompt_tokens.tolist() == [2, 1, 3]


def test_lengths_alone_serve_a_generator():
    text = "prompt_tokens,output_tokens\n74,918\n"
    assert parse(text, arrivals=False).prompt_tokens.tolist() == [74]
    with pytest.raises(TraceError) as error:
        parse(text)
    assert error.value.column == "arrival_s"


HEADER = "arrival_s,prompt_tokens,output_tokens"


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        (f"{HEADER}\n0,5,3\n1,0,3\n", 3, "prompt_tokens"),
        (f"{HEADER}\n0,5,3\n\n1,2.5,3\n", 4, "prompt_tokens"),
        (f"{HEADER}\n0,5,\n", 2, "output_tokens"),
        (f"{HEADER}\n0,5,99999999999\n", 2, "output_tokens"),
        (f"{HEADER}\nsoon,5,3\n", 2, "arrival_s"),
        (f"{HEADER}\nnan,5,3\n", 2, "arrival_s"),
        (f"{HEADER}\n-1,5,3\n", 2, "arrival_s"),
        (f"{HEADER}\n0,5\n", 2, None),
        (f'{HEADER}\n0,5,"3\n', 2, None),
        (f"{HEADER},timeout_s\n0,5,3,0\n", 2, "timeout_s"),
        (f"{HEADER},tenant\n0,5,3,{'x' * 257}\n", 2, "tenant"),
        (f"{HEADER},prefix_id,prefix_tokens\n0,5,3,a,5\n0,5,3,a,6\n", 3, "prefix_tokens"),
        (f"{HEADER},prefix_id\n0,5,3,a\n", 1, None),
        (f"{HEADER},arrival_s\n0,5,3,1\n", 1, None),
        (f"{HEADER},arrival_ms\n0,5,3,1\n", 1, "arrival_s"),
        ("arrival_s,prompt_tokens\n0,5\n", 1, "output_tokens"),
        (f"{HEADER}\n", None, None),
        ("", 1, "prompt_tokens"),
    ],
)
def test_bad_rows_name_line_and_column(text: str, line: int | None, column: str | None):
    with pytest.raises(TraceError) as error:
        parse(text)
    assert (error.value.line, error.value.column) == (line, column)
    assert (f"line {line}" in str(error.value)) == (line is not None)
    assert (f"column {column}" in str(error.value)) == (column is not None)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"arrival_s,\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(path)


def test_prompts_share_exactly_their_prefixes():
    trace = parse(
        f"{HEADER},prefix_id,prefix_tokens\n0,6,1,a,4\n0,6,1,a,4\n0,8,1,a,6\n0,6,1,b,4\n0,6,1,,0\n"
    )
    one, two, longer, other, own = (trace.prompt(index).tolist() for index in range(5))
    assert one[:4] == two[:4] == longer[:4]
    assert longer[4:6] == one[:2]  # the prefix goes on
    assert len({one[4], two[4], longer[6], other[0], other[4], own[0], one[0]}) == 7
    assert [len(prompt) for prompt in (one, longer, own)] == [6, 8, 6]
    assert END not in {*one, *two, *longer, *other, *own}
    assert {trace.own_id(index) for index in range(5)} == {
        p[-1] for p in (one, two, longer, other, own)
    }


def test_a_request_carries_its_index():
    trace = parse(f"{HEADER}\n0,3,2\n1.5,4,2\n")
    request = trace.request(1, 7, PARAMS)
    assert (request.request_id, request.key, request.arrival) == ("1", (1, 0), 1.5)
    assert (request.max_tokens, request.stop_ids) == (7, frozenset({END}))
    assert len(request.prompt) == 4


def test_scaling_rounds_up_and_cuts():
    trace = parse(f"{HEADER},prefix_id,prefix_tokens\n2,17,16,a,9\n4,800,3,,0\n")
    scaled = trace.scaled(prompt=1 / 8, output=1 / 4, time=0.5, max_prompt=50)
    assert scaled.arrival.tolist() == [1, 2]
    assert scaled.prompt_tokens.tolist() == [3, 50]
    assert scaled.output_tokens.tolist() == [4, 1]
    assert scaled.prefix_tokens.tolist() == [2, 0]


def test_engines_share_a_trace_in_turn():
    trace = parse(f"{HEADER}\n" + "".join(f"{i},{i + 1},1\n" for i in range(5)))
    assert trace.share(0, 2).prompt_tokens.tolist() == [1, 3, 5]
    assert trace.share(1, 2).arrival.tolist() == [1, 3]


def test_gamma_gaps_have_the_given_rate_and_variation():
    for cv in (0.5, 1.0, 2.0):
        arrival = gamma_arrivals(np.random.default_rng(1), 4.0, cv, count=200_000)
        gaps = np.diff(arrival)
        assert gaps.mean() == pytest.approx(0.25, rel=0.02)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)


def test_without_variation_arrivals_are_evenly_spaced():
    arrival = gamma_arrivals(np.random.default_rng(0), 4.0, 0.0, count=4)
    assert arrival.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_phases_multiply_the_rate_and_begin_anew():
    phases = (Phase(10, 2.0), Phase(5, 0.0), Phase(5, 1.0))
    arrival = gamma_arrivals(np.random.default_rng(0), 10.0, 0.0, seconds=40.0, phases=phases)
    counts, _ = np.histogram(arrival, [0, 10, 15, 20, 30, 35, 40])
    assert np.abs(counts - [200, 0, 50, 200, 0, 50]).max() <= 1
    assert (np.diff(arrival) > 0).all()


def test_a_seed_decides_everything():
    def make(seed: int) -> Trace:
        rng = np.random.default_rng(seed)
        lengths = Independent(Lognormal(120, 0.8, 16, 512), Lognormal(64, 0.8, 8, 256))
        return generate(rng, gamma_arrivals(rng, 2.0, 2.0, seconds=50.0), lengths)

    assert np.array_equal(make(3).arrival, make(3).arrival)
    assert np.array_equal(make(3).output_tokens, make(3).output_tokens)
    assert not np.array_equal(make(3).arrival[:10], make(4).arrival[:10])


def test_lognormal_lengths_keep_their_mean_and_limits():
    rng = np.random.default_rng(0)
    prompts = Lognormal(100, 0.5, 1, 100_000).draw(rng, 100_000)
    assert prompts.mean() == pytest.approx(100, rel=0.02)
    assert np.log(prompts).std() == pytest.approx(0.5, rel=0.03)
    cut = Lognormal(100, 0.5, 90, 110).draw(rng, 1000)
    assert (cut.min(), cut.max()) == (90, 110)


def test_resampled_lengths_stay_in_pairs():
    trace = parse(f"{HEADER}\n0,10,1\n0,20,2\n0,30,3\n")
    prompts, outputs = Resampled(trace).draw(np.random.default_rng(0), 100)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 1), (20, 2), (30, 3)}

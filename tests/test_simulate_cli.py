"""`jaxserve simulate`, without a device; and `bench --fit` on a tiny model, whose file it reads."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve import simulate
from jaxserve.config import ConfigError, EngineConfig
from scheduler.steptime import StepTimeModel

TIMES = """
platform = "cpu"
decode = {step = 0.02, token = 0.001}
mixed = {step = 0.03, token = 0.0005}

[engine]
num_pages = 64
page_size = 16
max_num_seqs = 8
max_num_batched_tokens = 64
max_model_len = 512
"""
TRACE = "arrival_s,prompt_tokens,output_tokens,kind\n" + "".join(
    f"{i / 4},{20 + i},{5 + i % 7},x\n" for i in range(40)
)
ENGINE_FLAGS = ("num_pages", "max_num_seqs", "max_waiting", "max_model_len")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    for name in ENGINE_FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--admission")
    return parser.parse_args(arguments)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "times.toml").write_text(TIMES)
    (tmp_path / "trace.csv").write_text(TRACE)
    return {"times": str(tmp_path / "times.toml"), "trace": str(tmp_path / "trace.csv")}


def run(files: dict[str, str], tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    args = parse("--model-time", files["times"], "--json", str(out), *arguments)
    assert simulate.main(args) == 0
    return json.loads(out.read_text())


def test_a_trace_from_file_to_table(files: dict[str, str], tmp_path: Path, capsys: Any):
    report = run(files, tmp_path, "--trace", files["trace"])
    assert report["requests"] == report["endings"]["stop"] == 40
    assert report["output_tokens"] == sum(5 + i % 7 for i in range(40))
    assert report["num_pages"] == 64
    assert report["attainment"] == 1.0
    assert report["goodput"] == report["throughput"] > 0
    assert set(report["series"]) == {"at", "held", "cached", "waiting", "running"}
    shown = capsys.readouterr()
    assert "goodput" in shown.out
    assert "100.00% of requests" in shown.out
    assert "columns without a use here: kind" in shown.err


def test_flags_win_over_the_measured_engines_settings(files: dict[str, str], tmp_path: Path):
    trace = ("--trace", files["trace"], "--scale-time", "0.05")
    report = run(files, tmp_path, *trace, "--num-pages", "9", "--admission", "fits")
    assert report["num_pages"] == 9
    assert report["ttft"]["p99"] > run(files, tmp_path, *trace)["ttft"]["p99"]


def test_a_generated_load_with_phases(files: dict[str, str], tmp_path: Path):
    generated = ("--rate", "5", "--cv", "2", "--phases", "4x1,4x4,8x0.25", "--seed", "3")
    lengths = ("--prompt", "40,0.5,8,200", "--output", "10,0.5,1,60")
    report = run(files, tmp_path, *generated, *lengths)
    assert 60 < report["requests"] < 180  # 110 are expected
    assert report == run(files, tmp_path, *generated, *lengths)
    resampled = run(files, tmp_path, *generated, "--trace", files["trace"], "--scale-output", "2")
    assert resampled["requests"] == report["requests"]
    assert resampled["output_tokens"] >= 10 * resampled["requests"]


def test_the_number_of_engines_that_a_load_needs(
    files: dict[str, str], tmp_path: Path, capsys: Any
):
    load = ("--rate", "60", "--requests", "400", "--trace", files["trace"], "--slo-ttft", "0.5")
    alone = run(files, tmp_path, *load)
    assert alone["attainment"] < 0.5
    report = run(files, tmp_path, *load, "--engines", "auto", "--attainment", "0.95")
    assert report["attainment"] >= 0.95
    assert report["num_pages"] == 64 * report["engines"]
    fewer = run(files, tmp_path, *load, "--engines", str(report["engines"] - 1))
    assert fewer["attainment"] < 0.95
    assert f"{report['engines']} engines reach 95.00%" in capsys.readouterr().out


def test_refusals_count_against_the_slo(files: dict[str, str], tmp_path: Path):
    load = ("--rate", "200", "--requests", "100", "--cv", "0", "--trace", files["trace"])
    report = run(files, tmp_path, *load, "--max-waiting", "2", "--slo-ttft", "100")
    assert report["endings"]["refused"] > 50
    assert report["attainment"] == report["endings"]["stop"] / 100


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((), "trace"),
        (("--rate", "1"), "rate"),
        (("--rate", "0", "--requests", "5", "--trace", "TRACE"), "rate"),
        (("--rate", "1", "--trace", "TRACE"), "requests"),
        (("--rate", "1", "--trace", "TRACE", "--phases", "30*2"), "phases"),
        (("--rate", "1", "--trace", "TRACE", "--phases", "30x0"), "phases"),
        (("--rate", "1", "--requests", "5", "--prompt", "1,2", "--output", "1,1,1,1"), "prompt"),
        (("--trace", "TRACE", "--scale-prompt", "0"), "scale_prompt"),
        (("--trace", "TRACE", "--engines", "none"), "engines"),
        (("--trace", "TRACE", "--engines", "auto", "--attainment", "2"), "attainment"),
        (("--trace", "TRACE", "--admission", "hope"), "admission"),
    ],
)
def test_bad_arguments_are_named(files: dict[str, str], arguments: tuple[str, ...], field: str):
    given = [files["trace"] if a == "TRACE" else a for a in arguments]
    with pytest.raises(ConfigError) as error:
        simulate.main(parse("--model-time", files["times"], *given))
    assert error.value.field == field


def test_bad_files_are_named_with_their_place(files: dict[str, str], tmp_path: Path):
    bad = tmp_path / "bad.csv"
    bad.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,many\n")
    with pytest.raises(ConfigError, match=r"bad\.csv: line 2, column output_tokens: must be"):
        simulate.main(parse("--model-time", files["times"], "--trace", str(bad)))
    Path(files["times"]).write_text(TIMES + "num_page = 3\n")
    with pytest.raises(ConfigError, match="num_page: is not a setting"):
        simulate.main(parse("--model-time", files["times"], "--trace", files["trace"]))
    Path(files["times"]).write_text("decode.step = -1")
    with pytest.raises(ConfigError, match="model_time: mixed: is missing"):
        simulate.main(parse("--model-time", files["times"], "--trace", files["trace"]))
    with pytest.raises(FileNotFoundError):
        simulate.main(parse("--model-time", "nowhere.toml", "--trace", files["trace"]))


def test_what_no_device_decides_must_be_given(files: dict[str, str]):
    Path(files["times"]).write_text(TIMES.replace("max_model_len = 512", ""))
    with pytest.raises(ConfigError, match="max_model_len: is needed"):
        simulate.main(parse("--model-time", files["times"], "--trace", files["trace"]))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_plot_is_an_svg(files: dict[str, str], tmp_path: Path):
    path = tmp_path / "pool.svg"
    run(files, tmp_path, "--trace", files["trace"], "--plot", str(path))
    text = path.read_text()
    assert text.startswith("<?xml")
    assert "<svg" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="has matplotlib")
def test_without_matplotlib_a_plot_says_how_to_install_it(files: dict[str, str]):
    with pytest.raises(ConfigError, match=r"jaxserve\[plots\]"):
        simulate.main(
            parse("--model-time", files["times"], "--trace", files["trace"], "--plot", "x.svg")
        )


@pytest.mark.slow
def test_a_fitted_file_drives_the_simulator(
    tiny_llama: str, compile_cache: str, files: dict[str, str], tmp_path: Path, capsys: Any
):
    from jaxserve import fit

    parser = argparse.ArgumentParser()
    fit.add_arguments(parser)
    path = tmp_path / "fitted.toml"
    args = parser.parse_args(["--fit", str(path), "--seconds", "0"])
    config = EngineConfig(
        model=tiny_llama,
        dtype="float32",
        num_pages=40,
        max_num_seqs=4,
        max_model_len=128,
        max_num_batched_tokens=64,
        compile_cache=compile_cache,
    )
    assert fit.main(args, config) == 0
    shown = capsys.readouterr().out
    for name in ("decode", "mixed", "sampler"):
        assert name in shown
    model = StepTimeModel.load(path)
    assert model.engine["num_pages"] == 40
    assert model.platform == "cpu"
    assert 0 < model.host < 1
    assert max(model.decode.step, model.decode.token, model.decode.read) > 0
    report = run(files | {"times": str(path)}, tmp_path, "--trace", files["trace"])
    assert report["endings"]["stop"] == 40

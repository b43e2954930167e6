"""The command line's own errors. The model is never loaded here; jax is never imported."""

import subprocess
import sys

import pytest

from jaxserve.cli import main
from jaxserve.server.lifecycle import bind
from jaxserve.terminal import address, progress, ready_text


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "jaxserve.cli", *args], capture_output=True, text=True, timeout=60
    )


def test_help_names_every_command_and_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("serve", "generate", "chat"))
    flags = "num-pages page-size max-num-seqs max-num-batched-tokens max-model-len dtype config"
    for command, more in (("serve", "host port"), ("generate", "model top-k seed"), ("chat", "")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert all(f"--{flag}" in text for flag in (flags + " " + more).split())


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["sing"],
        ["serve", "--port", "many"],
        ["serve", "a", "b"],
        ["generate"],
        ["chat", "--top-k", "x"],
    ],
)
def test_wrong_usage_is_code_2(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["serve", "--num-pages", "0"], "num_pages"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "--dtype", "int3"], "dtype"),
        (["serve", "--config", "no/such.toml"], "no/such.toml"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--max-num-seqs", "0"], "max_num_seqs"),
        (["chat", "--top-p", "0"], "top_p"),
    ],
)
def test_a_bad_setting_is_one_line_and_code_2(args, named, capsys):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: error: ")
    assert named in error
    assert error.count("\n") == 1


def test_an_unknown_key_in_the_file_is_named(tmp_path, capsys):
    path = tmp_path / "x.toml"
    path.write_text("num_pagez = 4\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert "num_pagez" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_anything_loads():
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        result = run("serve", "--port", str(port), "no/such/model")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"jaxserve: error: can't listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_the_server_and_the_command_line_import_without_jax():
    code = """
import pkgutil, sys
import jaxserve.cli, jaxserve.terminal, jaxserve.config, jaxserve.server
for module in pkgutil.iter_modules(jaxserve.server.__path__):
    __import__(f"jaxserve.server.{module.name}")
print(sorted({"jax", "jaxlib", "flax", "transformers"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://localhost:8000"),
        ("::", "http://localhost:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_the_address_to_paste(host, url):
    assert address(host, 8000) == url
    text = ready_text("m", url)
    assert f"curl -N {url}/v1/chat/completions" in text
    assert f'OpenAI(base_url="{url}/v1"' in text


def test_progress_without_a_terminal_is_a_line_per_quarter(capsys):
    with progress() as show:
        for done in range(9):
            show("load", done, 8, "w")
        show("compile", 0, 2, "decode")
    assert capsys.readouterr().err.splitlines() == [
        "loading weights: 0/8 w",
        "loading weights: 2/8 w",
        "loading weights: 4/8 w",
        "loading weights: 6/8 w",
        "loading weights: 8/8 w",
        "compiling: 0/2 decode",
    ]

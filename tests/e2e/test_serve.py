"""`jaxserve serve` as users run it: a process, a real socket, the openai client, SIGTERM."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import Served, start


@pytest.fixture(scope="module")
def served(tiny_llama: str, compile_cache: str) -> Iterator[Served]:
    served = start(tiny_llama, compile_cache)
    yield served
    served.stop()


def test_models_and_health(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["llama"]
    assert served.get("/health")[0] == 200


def test_stream_equals_non_stream(served: Served) -> None:
    request: dict[str, Any] = {
        "model": "llama",
        "messages": [{"role": "user", "content": "Hello there, dog."}],
        "max_tokens": 30,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = served.client.chat.completions.create(**request)
    chunks = list(
        served.client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert whole.usage == chunks[-1].usage


def test_64_concurrent_streams_equal_their_solo_runs(served: Served) -> None:
    """More than run at once and more than the pool holds: they wait, and agree."""

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="llama",
            prompt=[3 + i, 40, 50 + i],
            max_tokens=60 + i % 30,
            temperature=0.8 if i % 2 else 0.0,
            seed=i,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([c.choices[0].text async for c in stream if c.choices])

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0
        ) as client:
            together = await asyncio.gather(*(one(client, i) for i in range(64)))
            return together, [await one(client, i) for i in range(0, 64, 9)]

    before = served.metrics()
    together, solo = asyncio.run(run())
    assert [together[i] for i in range(0, 64, 9)] == solo
    after = served.wait_idle()
    made = sum(60 + i % 30 for i in [*range(64), *range(0, 64, 9)])
    name = "generation_tokens_total"
    assert after[name] - before[name] == made
    assert after["kv_pages{free}"] + after["kv_pages{cached}"] == 64
    ended = "request_finished_total{length}"
    assert after[ended] - before[ended] == 72


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(served: Served, stream: bool) -> None:
    """vllm and ATOM PR#1562: also a client that waits for the whole answer can leave."""
    body = {"model": "llama", "prompt": [5, 6], "max_tokens": 230, "stream": stream}
    before = served.wait_idle()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    headers = {"Content-Type": "application/json"}
    payload = json.dumps(body | {"ignore_eos": True, "n": 8})
    connection.request("POST", "/v1/completions", payload, headers)
    if stream:
        connection.getresponse().read(10)
    else:
        while not served.metrics()["num_requests_running"]:
            time.sleep(0.005)
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    after = served.wait_idle()
    assert after["kv_pages{free}"] + after["kv_pages{cached}"] == 64
    aborted = "request_finished_total{abort}"
    assert after[aborted] - before[aborted] == 8
    made = "generation_tokens_total"
    assert after[made] - before[made] < 8 * 230


def test_too_long_prompts_are_refused_and_others_served(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model="llama", prompt=[7] * 256, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in str(caught.value)
    assert served.client.completions.create(model="llama", prompt=[7], max_tokens=1).usage


def test_sigterm_lets_streams_end_and_refuses_new_ones(tiny_llama: str, compile_cache: str) -> None:
    """vllm#24885: running streams are whole, new requests get 503, exit code 0."""
    served = start(tiny_llama, compile_cache)
    stream = served.client.completions.create(
        model="llama",
        prompt=[9, 8],
        max_tokens=240,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    first = next(stream)
    served.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 5
    while served.get("/health")[0] == 200 and time.monotonic() < end:
        time.sleep(0.01)
    refused = None
    try:
        served.client.completions.create(model="llama", prompt=[1], max_tokens=1)
    except openai.APIStatusError as error:
        refused = error.status_code
    except openai.APIConnectionError:
        refused = 503  # the streams had already ended, and the listener is closed
    assert refused == 503
    chunks = [first, *stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert served.process.wait(20) == 0


def test_port_in_use_is_one_line_before_anything_loads(served: Served, tiny_llama: str) -> None:
    command = [sys.executable, "-m", "jaxserve.cli", "serve", tiny_llama]
    done = subprocess.run(
        [*command, f"--port={served.port}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"127.0.0.1:{served.port}" in done.stderr


def test_generate_streams_to_the_terminal(tiny_llama: str, compile_cache: str) -> None:
    command = [sys.executable, "-m", "jaxserve.cli", "generate", "Hello", "--model", tiny_llama]
    done = subprocess.run(
        [*command, "--max-tokens=5", "--seed=1", f"--compile-cache={compile_cache}"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxserve.cli", "generate", "Hello"]
    done = subprocess.run(
        [*command, "--model", str(tmp_path / "none.gguf")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr

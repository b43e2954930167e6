"""The engine against what transformers (torch, float32) computed from the same weights.

Numbers and their making: tests/golden/README.md. All prompts of a file run together, in one batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.weights.open import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = sorted(path.name for path in (GOLDEN / "tiny").iterdir())
TINY_GGUF = sorted(path.stem for path in (GOLDEN / "tiny_gguf").glob("*.gguf"))
SMALL: dict[str, Any] = {
    "num_pages": 64,
    "page_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "row_buckets": "single",
    "token_buckets": "single",
}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def check(llm: LLM, golden: dict[str, Any], tolerance: float) -> None:
    """Same ids, and logprobs of the chosen token and of the five likeliest within tolerance."""
    prompts = golden["prompts"]
    params = SamplingParams(
        temperature=0.0, max_tokens=golden["steps"], ignore_eos=True, logprobs=5
    )
    outputs = llm.generate([p["prompt_token_ids"] for p in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        assert made.token_ids == prompt["token_ids"], prompt["name"]
        assert made.logprobs is not None
        chosen = [entry[t].logprob for entry, t in zip(made.logprobs, made.token_ids, strict=True)]
        np.testing.assert_allclose(chosen, prompt["logprobs"], atol=tolerance)
        for entry, top_logprobs in zip(made.logprobs, prompt["top_logprobs"], strict=True):
            likeliest = sorted((p.logprob for p in entry.values()), reverse=True)[:5]
            np.testing.assert_allclose(likeliest, top_logprobs, atol=tolerance)
    llm.scheduler.check_invariants()
    assert llm.stats.compilations["serving"] == 0


@pytest.fixture(scope="module")
def smollm2() -> dict[str, Any]:
    return read(GOLDEN / "smollm2.json")


SMOLLM2: dict[str, Any] = {"num_pages": 256, "max_num_seqs": 16, "max_num_batched_tokens": 128}
SMOLLM2 |= {"row_buckets": "single", "token_buckets": "single"}


def test_smollm2_from_gguf(make_llm: Callable[..., LLM], smollm2: dict[str, Any]) -> None:
    assert len(smollm2["prompts"]) >= 8
    llm = make_llm(**SMOLLM2)
    check(llm, smollm2, 2e-3)
    for prompt in smollm2["prompts"]:
        if "messages" in prompt:
            ids = llm.tokenizer.render_chat(prompt["messages"])
        else:
            ids = llm.tokenizer.encode(prompt["text"])
        assert ids == prompt["prompt_token_ids"], prompt["name"]


def test_smollm2_from_safetensors(
    make_llm: Callable[..., LLM], smollm2: dict[str, Any], tmp_path: Path
) -> None:
    """The same weights written as a Hugging Face directory, which the GGUF loader is no part of."""
    checkpoint = open_checkpoint(None)
    tensors = {name: np.array(tensor) for name, tensor in checkpoint.tensors()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(make_llm(str(tmp_path), **SMOLLM2), smollm2, 2e-3)


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_of_each_family(make_llm: Callable[..., LLM], name: str) -> None:
    directory = GOLDEN / "tiny" / name
    check(make_llm(str(directory), **SMALL), read(directory / "golden.json"), 1e-3)


def test_bfloat16_is_close(make_llm: Callable[..., LLM], tiny_llama: str) -> None:
    """The default dtype where the CPU has it: 8 bits of mantissa, so about 0.05 in a logprob."""
    golden = read(Path(tiny_llama) / "golden.json")
    llm = make_llm(tiny_llama, **SMALL | {"dtype": "bfloat16"})
    prompts = golden["prompts"]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=5)
    for prompt, output in zip(
        prompts, llm.generate([p["prompt_token_ids"] for p in prompts], params), strict=True
    ):
        made = output.outputs[0]
        assert made.token_ids == prompt["token_ids"][:1]
        assert made.logprobs is not None
        chosen = made.logprobs[0][made.token_ids[0]].logprob
        assert chosen == pytest.approx(prompt["logprobs"][0], abs=0.1)


@pytest.mark.parametrize("name", TINY_GGUF)
def test_tiny_gguf_of_each_type(make_llm: Callable[..., LLM], name: str) -> None:
    path = GOLDEN / "tiny_gguf" / f"{name}.gguf"
    check(make_llm(str(path), **SMALL), read(path.with_suffix(".json")), 1e-3)

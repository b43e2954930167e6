"""Tiny random models, written to disk in both formats by code that shares nothing with ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _tensors(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors for a config, under Hugging Face names."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = (head_dim * config[f"num_{k}_heads"] for k in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        one = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inter, hidden),
            "mlp.up_proj.weight": (inter, hidden),
            "mlp.down_proj.weight": (hidden, inter),
        }
        biased = ["q", "k", "v"] if config["model_type"] == "qwen2" else []
        biased += ["q", "k", "v", "o"] if config.get("attention_bias") else []
        for name in biased:
            one[f"self_attn.{name}_proj.bias"] = one[f"self_attn.{name}_proj.weight"][:1]
        if config["model_type"] == "qwen3":
            one |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in one.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def _write_hf(
    directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k: the two halves of each head, interleaved row by row."""
    out = np.empty_like(rows)
    size = len(rows) // num_heads
    for head in range(num_heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def _write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Matrices are quantized to `kind`, vectors stay float32. `edit` adds metadata or tensors."""
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_token_list([f"token{i}é" for i in range(config["vocab_size"])])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    edit(writer)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, values in tensors.items():
        for letter, num_heads in heads.items():
            if arch == "llama" and f".{letter}_proj." in name:
                values = _permute(values, num_heads)
        stored = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        raw = quantize(np.ascontiguousarray(values, np.float32), stored)
        writer.add_tensor(_gguf_name(name), raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def configs() -> dict[str, dict[str, Any]]:
    """Tiny config.json contents by model type."""
    return {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


@pytest.fixture
def make_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return _tensors


@pytest.fixture
def write_hf() -> Callable[..., Path]:
    return _write_hf


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    return _write_gguf

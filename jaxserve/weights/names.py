"""Tensor names: what each model needs, with shapes, and how GGUF's names map to Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jaxserve.models.config import ModelConfig

Shape = tuple[int, ...]

# Rotary tables that old checkpoints carry: recomputed from the config, never read.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")

_GGUF_TOP: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_GGUF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the model needs, by Hugging Face name, with its shape ([out, in])."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": s for name, s in _layer_shapes(config)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", inter, hidden, config.mlp_bias),
        ("mlp.up_proj", inter, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inter, config.mlp_bias),
    ):
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)


def is_derived(name: str) -> bool:
    """True for a tensor that the config already determines, and that is not loaded."""
    return _DERIVED.fullmatch(name) is not None


def from_gguf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that has none is given back as it is."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _GGUF_LAYER:
        return _GGUF_TOP.get(name, name)
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"

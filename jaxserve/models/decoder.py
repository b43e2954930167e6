"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) as Flax NNX modules.

The modules name the weights and say what is computed. The KV cache is an argument and a result,
never module state, and how attention and linear layers are computed is handed in. Axes in comments:
tokens, heads, kv_heads, head_dim, hidden, inter, vocab.

Weights that read the same input are fused: q, k and v of each KV head lie together, so that a shard
of the kv_heads axis is a whole attention group; gate and up are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearImpl
from jaxserve.models.rope import apply_rope

# (cache, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> (cache, out as q)
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]


def _param(*shape: int, dtype: Any) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float, dtype: Any):
        self.epsilon = epsilon
        self.weight = _param(size, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(x.dtype) * self.weight[...]


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, linear: LinearImpl, dtype: Any):
        self.config, self.linear = config, linear
        self.group = config.num_heads // config.num_kv_heads
        fused = config.num_kv_heads * (self.group + 2) * config.head_dim
        self.qkv = _param(fused, config.hidden_size, dtype=dtype)
        self.output = _param(config.hidden_size, config.num_heads * config.head_dim, dtype=dtype)
        self.qkv_bias = _param(fused, dtype=dtype) if config.qkv_bias else None
        self.output_bias = _param(config.hidden_size, dtype=dtype) if config.output_bias else None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: Any, attend: Attend
    ) -> tuple[Any, jax.Array]:
        config, tokens = self.config, x.shape[0]
        qkv = self.linear.linear(x, self.qkv[...])
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...]
        qkv = qkv.reshape(tokens, config.num_kv_heads, self.group + 2, config.head_dim)
        q = qkv[:, :, : self.group].reshape(tokens, config.num_heads, config.head_dim)
        k, v = qkv[:, :, self.group], qkv[:, :, self.group + 1]
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        cache, out = attend(cache, q, k, v)
        out = self.linear.linear(out.reshape(tokens, -1), self.output[...])
        if self.output_bias is not None:
            out = out + self.output_bias[...]
        return cache, out


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, linear: LinearImpl, dtype: Any):
        self.linear = linear
        inter, hidden = config.intermediate_size, config.hidden_size
        self.gate_up = _param(2, inter, hidden, dtype=dtype)
        self.down = _param(hidden, inter, dtype=dtype)
        self.gate_up_bias = _param(2, inter, dtype=dtype) if config.mlp_bias else None
        self.down_bias = _param(hidden, dtype=dtype) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.linear.gate_up(x, self.gate_up[...])
        if self.gate_up_bias is not None:
            gate, up = gate + self.gate_up_bias[0], up + self.gate_up_bias[1]
        out = self.linear.linear(jax.nn.silu(gate) * up, self.down[...])
        return out if self.down_bias is None else out + self.down_bias[...]


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, linear: LinearImpl, dtype: Any):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, linear, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, linear, dtype)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: Any, attend: Attend
    ) -> tuple[Any, jax.Array]:
        cache, mixed = self.attention(self.input_norm(x), rope, cache, attend)
        x = x + mixed
        return cache, x + self.mlp(self.post_norm(x))


class Decoder(nnx.Module):
    """What is before and after the layers: token ids to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, linear: LinearImpl, dtype: Any):
        self.config, self.linear = config, linear
        self.embedding = _param(config.vocab_size, config.hidden_size, dtype=dtype)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.head = _param(config.vocab_size, config.hidden_size, dtype=dtype)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """[tokens, hidden] of int32[tokens] ids."""
        return self.embedding[...][token_ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[rows, vocab] of hidden states [rows, hidden], as the last layer leaves them."""
        tied = self.config.tie_word_embeddings
        weight = self.embedding[...] if tied else self.head[...]
        return self.linear.head(self.norm(hidden), weight)

"""How a linear layer, a fused gate/up projection and the output head are multiplied.

Owns the formulation of `x @ W.T` for each platform, chosen once when the model is built
(`select_linear`). Weights are stored [out, in], as checkpoints have them, on every platform;
activations are token-major. Must not know about layers, caches or plans. A quantized weight is a
further entry of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class LinearImpl:
    """The multiplications of one model; nothing here adds a bias.

    linear:  (x [tokens, in], weight [out, in]) -> [tokens, out], in x's dtype
    gate_up: (x [tokens, hidden], weight [2, inter, hidden]) -> [2, tokens, inter], in x's dtype
    head:    (x [rows, hidden], embedding [vocab, hidden]) -> float32[rows, vocab]
    """

    linear: Callable[[jax.Array, jax.Array], jax.Array]
    gate_up: Callable[[jax.Array, jax.Array], jax.Array]
    head: Callable[[jax.Array, jax.Array], jax.Array]


# (x [tokens, in], weight [out, in], dtype of the result) -> [tokens, out]
_Dot = Callable[[jax.Array, jax.Array, jax.typing.DTypeLike], jax.Array]


def select_linear(platform: str, dtype: jax.typing.DTypeLike) -> LinearImpl:
    """The formulation for a platform (`jax.Device.platform`) and the dtype of the weights.

    A pair without an entry of its own gets the plain form, which every XLA backend compiles.
    """
    return _TABLE.get((platform, jnp.dtype(dtype).name), _PLAIN)


def _plain(x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    in_with_in = (((1,), (1,)), ((), ()))
    # An accelerator would round float32 operands to fewer bits.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weight, in_with_in, precision=precision, preferred_element_type=out_dtype
    )


# SmolLM2-135M's layers and head on XLA:CPU: `_weight_left` wins below, `_plain` from here on.
_FEW_TOKENS = 128


def _weight_left(x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """The weight as the left operand, as long as the tokens are few.

    XLA:CPU's matmul library repacks its right operand at every call: that should be the few
    activations, not the weight. Without the barrier XLA folds transpose(dot(W, x)) back into
    dot(x, W).
    """
    if x.shape[0] >= _FEW_TOKENS:
        return _plain(x, weight, out_dtype)
    return lax.optimization_barrier(_plain(weight, x, out_dtype)).T


def _never_one_row(x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """`_weight_left`, with a lone bfloat16 row doubled: the library is ten times slower for one."""
    if x.shape[0] > 1:
        return _weight_left(x, weight, out_dtype)
    return _weight_left(jnp.concatenate([x, x]), weight, out_dtype)[:1]


# The head is 50 times as wide as a layer, so turning its result around costs more: fewer rows pay.
_FEW_HEAD_ROWS = 32


def _cpu_head(x: jax.Array, embedding: jax.Array) -> jax.Array:
    """Logits that are computed once and laid out by row: without the last barrier XLA:CPU fuses the
    transposition into each reader, which then strides through the vocabulary (64 rows: 42 ms
    against 9 with the search for the maximum)."""
    if x.shape[0] >= _FEW_HEAD_ROWS:
        return lax.optimization_barrier(_plain(x, embedding, jnp.float32))
    return lax.optimization_barrier(_never_one_row(x, embedding, jnp.float32))


def _linear_impl(
    dot: _Dot, head: Callable[[jax.Array, jax.Array], jax.Array] | None = None
) -> LinearImpl:
    def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(x, weight, x.dtype)

    def gate_up(x: jax.Array, weight: jax.Array) -> jax.Array:
        two, inter, hidden = weight.shape
        both = dot(x, weight.reshape(two * inter, hidden), x.dtype)
        return both.reshape(x.shape[0], two, inter).swapaxes(0, 1)

    def plain_head(x: jax.Array, embedding: jax.Array) -> jax.Array:
        return dot(x, embedding, jnp.float32)

    return LinearImpl(linear, gate_up, head or plain_head)


_PLAIN = _linear_impl(_plain)
_TABLE = {
    ("cpu", "float32"): _linear_impl(_weight_left, _cpu_head),
    ("cpu", "bfloat16"): _linear_impl(_never_one_row, _cpu_head),
}

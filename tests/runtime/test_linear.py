"""Every formulation is the same multiplication."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.linear import select_linear

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-8}  # relative: half a unit of the result, and more


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values / np.sqrt(shape[-1]), dtype)


def _exact(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 127, 128, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_products(platform: str, dtype: str, tokens: int):
    impl = select_linear(platform, dtype)
    x = _random((tokens, 96), dtype, seed=tokens) * 8
    weight = _random((48, 96), dtype, seed=1)
    gate_up = _random((2, 40, 96), dtype, seed=2)

    linear = jax.jit(impl.linear)(x, weight)
    both = jax.jit(impl.gate_up)(x, gate_up)
    logits = jax.jit(impl.head)(x, weight)

    assert (linear.shape, linear.dtype) == ((tokens, 48), jnp.dtype(dtype))
    assert (both.shape, both.dtype) == ((2, tokens, 40), jnp.dtype(dtype))
    assert (logits.shape, logits.dtype) == ((tokens, 48), jnp.float32)
    product = _exact(x) @ _exact(weight).T
    products = np.einsum("th,gih->gti", _exact(x), _exact(gate_up))
    np.testing.assert_allclose(_exact(linear), product, rtol=TOLERANCE[dtype], atol=1e-5)
    np.testing.assert_allclose(_exact(both), products, rtol=TOLERANCE[dtype], atol=1e-5)
    # The head accumulates and returns float32, whatever its operands.
    np.testing.assert_allclose(_exact(logits), product, atol=1e-5)


def test_the_weight_is_the_left_operand_on_cpu():
    """XLA must not fold transpose(dot(W, x)) back into dot(x, W)."""
    impl = select_linear("cpu", jnp.float32)
    x, weight = jnp.ones((4, 96)), jnp.ones((48, 96))
    compiled = jax.jit(impl.linear).lower(x, weight).compile().as_text() or ""
    (dot,) = [line for line in compiled.splitlines() if " dot(" in line]
    assert "f32[48,4]" in dot


def test_the_choice_is_made_by_platform_and_dtype():
    assert select_linear("cpu", jnp.float32) is select_linear("cpu", "float32")
    assert select_linear("cpu", "float32") is not select_linear("gpu", "float32")
    assert select_linear("cpu", "float16") is select_linear("cuda", "float16")

"""Rotary position embedding (arXiv 2104.09864) in the half-split form, with the scalings we
support."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32[head_dim / 2]: radians a position turns each pair by.

    linear divides all of them by `factor` (arXiv 2306.15595); llama3 only the slow ones, with a
    ramp between (Llama 3.1's published reference code); factors divides each by its own.
    """
    return _SCALINGS[rope.kind](rope.theta ** -(np.arange(0, head_dim, 2) / head_dim), rope).astype(
        np.float32
    )


def _default(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    return inverse


def _linear(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    return inverse / rope.factor


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    wavelength = 2 * math.pi / inverse
    ratio = rope.original_max_position / wavelength
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((ratio - rope.low_freq_factor) / span, 0.0, 1.0)
    return inverse * keep + inverse / rope.factor * (1.0 - keep)


def _factors(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    return inverse / np.asarray(rope.factors)


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "factors": _factors}


def rope_angles(inverse: np.ndarray, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[tokens, head_dim / 2], of int32[tokens] positions."""
    angles = positions.astype(jnp.float32)[:, None] * inverse[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of [tokens, heads, head_dim]; float32 inside."""
    cos, sin = (part[:, None, :] for part in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)

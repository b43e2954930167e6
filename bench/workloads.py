"""Seeded workloads as plain lists of requests: prompt ids and exact output lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Work:
    """One request: prompt token ids, and how many tokens it makes (end tokens are ignored)."""

    prompt: tuple[int, ...]
    output_tokens: int


def lognormal_lengths(
    rng: np.random.Generator, count: int, mean: float, sigma: float, low: int, high: int
) -> np.ndarray:
    """int[count] around `mean`, clipped to [low, high]."""
    draws = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(draws), low, high).astype(int)


def mixed_lengths(count: int = 64, *, seed: int = 0, vocab_size: int = 49152) -> list[Work]:
    """Prompts around 120 tokens (16..512) and outputs around 64 (8..256), both lognormal."""
    rng = np.random.default_rng(seed)
    prompts = lognormal_lengths(rng, count, 120, 0.8, 16, 512)
    outputs = lognormal_lengths(rng, count, 64, 0.8, 8, 256)
    return [
        # ids of ordinary tokens: the first hundred of a vocabulary are often control tokens
        Work(tuple(rng.integers(100, vocab_size, p).tolist()), int(n))
        for p, n in zip(prompts, outputs, strict=True)
    ]

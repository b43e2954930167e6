"""Continuous batching for JAX: `LLM` and `SamplingParams` for experiments, `jaxserve serve` for
clients.

Names are imported when first used, so that the server's modules stay free of jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from scheduler.errors import RequestError
    from scheduler.request import RequestOptions, SamplingParams

_HOMES = {
    "LLM": "jaxserve.llm",
    "SamplingParams": "scheduler.request",
    "RequestOptions": "scheduler.request",
    "RequestError": "scheduler.errors",
    "EngineConfig": "jaxserve.config",
    "RequestOutput": "jaxserve.outputs",
    "CompletionOutput": "jaxserve.outputs",
    "Delta": "jaxserve.outputs",
    "Logprob": "jaxserve.outputs",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "Logprob",
    "RequestError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")

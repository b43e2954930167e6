"""What several test rooms share: one persistent compile cache a session, so that engines of the
same shape are compiled once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compile-cache"))


@pytest.fixture(scope="session")
def make_llm(compile_cache: str) -> Callable[..., Any]:
    """LLM(...) over the session's compile cache. Float32, so that token ids are exact."""
    from jaxserve import LLM

    def make(model: str | None = None, **settings: Any) -> LLM:
        settings = {"dtype": "float32", "compile_cache": compile_cache} | settings
        return LLM(model, **settings)

    return make


@pytest.fixture(scope="session")
def tiny_llama() -> str:
    """A random two-layer Llama with a tokenizer and a chat template."""
    return str(GOLDEN / "tiny" / "llama")

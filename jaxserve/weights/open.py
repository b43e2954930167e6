"""From what a user names to an opened checkpoint. Knows the forms of a name, not the formats."""

from __future__ import annotations

from pathlib import Path

from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.errors import ModelNotFound, UnsupportedModel
from jaxserve.weights.gguf_checkpoint import GGUFCheckpoint
from jaxserve.weights.hf_checkpoint import HFCheckpoint
from jaxserve.weights.hub import BUNDLED_NAME, bundled_path, download


def open_checkpoint(model: str | None = None) -> Checkpoint:
    """Open a model: nothing (the bundled one), a .gguf file, a local directory, a Hugging Face id.

    A path that exists wins over an id. Raises ModelNotFound, UnsupportedModel or CorruptCheckpoint.
    """
    if model is None:
        return GGUFCheckpoint.open(bundled_path(), BUNDLED_NAME)
    if not model.strip() or "\0" in model:
        raise ModelNotFound(f"{model!r} does not name a model")
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, no permission, ~ of an unknown user
        raise ModelNotFound(f"{model[:200]}: {error}") from error
    if path.is_dir():
        return HFCheckpoint.open(path, path.resolve().name)
    if path.suffix == ".safetensors" and path.is_file():
        raise UnsupportedModel(f"{path}: give the directory that holds it and its config.json")
    if path.is_file():
        return GGUFCheckpoint.open(path, path.stem)
    if model.startswith((".", "/", "~")) or model.endswith((".gguf", ".safetensors", "/")):
        raise ModelNotFound(f"{model}: there is no such file or directory")
    return HFCheckpoint.open(download(model), model)

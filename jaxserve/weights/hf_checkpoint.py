"""A checkpoint in a Hugging Face directory: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  gives numpy the bfloat16 that safetensors asks for
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.models.config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint, GenerationDefaults, StoredTensor
from jaxserve.weights.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from jaxserve.weights.fields import Fields
from jaxserve.weights.names import is_derived, tensor_shapes

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = ("F16", "BF16", "F32")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_ROWS = 4096


@dataclass(frozen=True)
class HFCheckpoint(Checkpoint):
    directory: Path
    shards: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path, name: str) -> HFCheckpoint:
        """Read config and headers. Raises ModelNotFound without a config.json or weights,
        CorruptCheckpoint or UnsupportedModel (naming file and field) for what cannot be loaded.
        """
        if not (directory / "config.json").is_file():
            gguf = sorted(path.name for path in directory.glob("*.gguf"))
            hint = f" It holds {gguf[0]}: give the path of that file." if gguf else ""
            raise ModelNotFound(f"{directory}: there is no config.json.{hint}")
        values = _read_json(directory / "config.json")
        config = ModelConfig.from_hf(values, str(directory / "config.json"))
        listing, shards = _find_shards(directory)
        stored = _read_headers(directory, shards)
        if config.tie_word_embeddings and _HEAD in stored and not _same_head(stored):
            # As transformers does: two different matrices mean that the flag is wrong.
            config = replace(config, tie_word_embeddings=False)
        generation = _generation(directory, values)
        checkpoint = cls(
            name, config, generation, str(directory / listing), stored, directory, shards
        )
        checkpoint.check_tensors()
        return checkpoint

    def load_tokenizer(self) -> Tokenizer:
        from jaxserve.text.tokenizer import Tokenizer

        return Tokenizer.from_directory(self.directory)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        needed = tensor_shapes(self.config)
        for shard in self.shards:
            with _open_shard(self.directory / shard) as file:
                for name in file.offset_keys():
                    if name in needed:
                        yield name, file.get_tensor(name)


def _find_shards(directory: Path) -> tuple[str, tuple[str, ...]]:
    """The file that lists the tensors, and the files that hold them."""
    if (directory / _SINGLE).is_file():
        return _SINGLE, (_SINGLE,)
    if (directory / _INDEX).is_file():
        fields = Fields(str(directory / _INDEX), _read_json(directory / _INDEX))
        shards = sorted({str(shard) for shard in fields.table("weight_map").values()})
        if not shards:
            raise fields.corrupt("weight_map", "lists no tensors")
        for shard in shards:
            if Path(shard).name != shard:
                raise CorruptCheckpoint(f"{fields.source}: shard {shard!r} is not a file name")
            if not (directory / shard).is_file():
                raise CorruptCheckpoint(f"{fields.source}: shard {shard} is missing")
        return _INDEX, tuple(shards)
    for name in _TORCH:
        if (directory / name).is_file():
            raise UnsupportedModel(
                f"{directory / name}: PyTorch files are not read; convert the model to safetensors "
                "(in transformers: model.save_pretrained(directory))"
            )
    raise ModelNotFound(f"{directory}: there is no {_SINGLE} and no {_INDEX}")


def _read_headers(directory: Path, shards: tuple[str, ...]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        path = directory / shard
        with _open_shard(path) as file:
            for name in file.offset_keys():
                if name in stored:
                    raise CorruptCheckpoint(f"{path}: tensor {name} is also in {stored[name].file}")
                view = file.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _DTYPES and not is_derived(name):
                    raise UnsupportedModel(
                        f"{path}: tensor {name} has dtype {dtype}, which is not one of "
                        f"{', '.join(_DTYPES)}"
                    )
                stored[name] = StoredTensor(str(path), tuple(view.get_shape()))
    return stored


def _open_shard(path: Path) -> Any:  # the compiled class has no type stub
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpoint(f"{path} is truncated or damaged: {error}") from error


def _same_head(stored: Mapping[str, StoredTensor]) -> bool:
    head, embedding = stored[_HEAD], stored.get(_EMBEDDING)
    if embedding is None or head.shape != embedding.shape:
        return False
    with (
        _open_shard(Path(head.file)) as head_file,
        _open_shard(Path(embedding.file)) as embedding_file,
    ):
        left, right = head_file.get_slice(_HEAD), embedding_file.get_slice(_EMBEDDING)
        num_rows = head.shape[0]
        ends = (
            (row, min(row + _COMPARED_ROWS, num_rows)) for row in range(0, num_rows, _COMPARED_ROWS)
        )
        return all(np.array_equal(left[row:end], right[row:end]) for row, end in ends)


def _generation(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    path = directory / "generation_config.json"
    own = Fields(str(path), _read_json(path) if path.is_file() else {})
    model = Fields(str(directory / "config.json"), config)
    ends = [
        *own.token_ids("eos_token_id"),
        *model.token_ids("eos_token_id"),
        *_tokenizer_end(directory),
    ]
    begins = [*own.token_ids("bos_token_id"), *model.token_ids("bos_token_id")]
    return GenerationDefaults.read(ends, begins)


def _tokenizer_end(directory: Path) -> list[int]:
    """The id of the eos_token that tokenizer_config.json names, if it does."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return []
    fields = Fields(str(path), _read_json(path))
    token = fields.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return []
    for key, entry in fields.table("added_tokens_decoder").items():
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
            return [int(key)]
    return _added_token(directory / "tokenizer.json", text)


def _added_token(path: Path, text: str) -> list[int]:
    if not path.is_file():
        return []
    fields = Fields(str(path), _read_json(path))
    for entry in fields.get_list("added_tokens"):
        if isinstance(entry, dict) and entry.get("content") == text:
            return Fields(str(path), entry).token_ids("id")
    return []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} does not hold a JSON object")
    return value

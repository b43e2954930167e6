"""A checkpoint in one GGUF file: metadata to config, names and layout to Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint, GenerationDefaults, StoredTensor
from jaxserve.weights.fields import Fields
from jaxserve.weights.gguf_file import GGUFFile
from jaxserve.weights.names import from_gguf_name, tensor_shapes

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

_ROPE_FACTORS = "rope_freqs.weight"
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class GGUFCheckpoint(Checkpoint):
    file: GGUFFile

    @classmethod
    def open(cls, path: Path, name: str) -> GGUFCheckpoint:
        """Raises CorruptCheckpoint or UnsupportedModel, naming the file and the field."""
        file = GGUFFile.open(path)
        source = str(path)
        Fields(source, file.metadata).require_neutral({"split.count": (0, 1)})
        factors: tuple[float, ...] = ()
        stored: dict[str, StoredTensor] = {}
        for tensor in file.tensors:
            if tensor.name == _ROPE_FACTORS:
                factors = tuple(file.read(tensor).ravel().astype(float).tolist())
            else:
                stored[from_gguf_name(tensor.name)] = StoredTensor(source, tensor.shape)
        names = {tensor.name for tensor in file.tensors}
        config = ModelConfig.from_gguf(file.metadata, names, factors, source)
        generation = _generation(Fields(source, file.metadata))
        checkpoint = cls(name, config, generation, source, stored, file)
        checkpoint.check_tensors()
        return checkpoint

    def load_tokenizer(self) -> Tokenizer:
        from jaxserve.text.tokenizer import Tokenizer

        return Tokenizer.from_gguf(self.file.metadata)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        needed = tensor_shapes(self.config)
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        for tensor in self.file.tensors:
            name = from_gguf_name(tensor.name)
            if name not in needed:
                continue
            values = self.file.read(tensor)
            num_heads = heads.get(name.rsplit(".", 2)[-2])
            if num_heads is not None and self.config.family == "llama":
                values = _to_half_split(values, num_heads)
            yield name, values


def _to_half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the order of q and k rows that files of architecture "llama" have.

    They store the pairs that rope turns side by side (0, 1), (2, 3), ...; Hugging Face half a head
    apart. The other architectures are stored as Hugging Face has them.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _generation(fields: Fields) -> GenerationDefaults:
    ends = [token for key in _END_KEYS for token in fields.token_ids(key)]
    begins = fields.token_ids("tokenizer.ggml.bos_token_id")
    return GenerationDefaults.read(ends, begins)

"""A checkpoint on disk as the engine sees it, and the checks that all formats share. Never jax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.weights.errors import CorruptCheckpoint, UnsupportedModel
from jaxserve.weights.names import Shape, is_derived, tensor_shapes

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the checkpoint says about generating. eos_token_ids is the union of what it names."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def read(cls, eos_token_ids: Iterable[int], bos_token_ids: Iterable[int]) -> GenerationDefaults:
        """The end tokens given, each once; the first begin token."""
        return cls(tuple(dict.fromkeys(eos_token_ids)), next(iter(bos_token_ids), None))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and its shape in Hugging Face's order ([out, in])."""

    file: str
    shape: Shape


@dataclass(frozen=True)
class Checkpoint(ABC):
    """An opened checkpoint: its headers are read and checked, its tensors are still on disk."""

    name: str  # to show: a hub id, a directory's or a file's name
    config: ModelConfig
    generation: GenerationDefaults
    listing: str  # the file that lists the tensors
    stored: Mapping[str, StoredTensor]  # by Hugging Face name

    @abstractmethod
    def load_tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor of `tensor_shapes(config)`, once, in storage order, with its Hugging Face
        name and shape ([out, in]).

        float16, bfloat16 or float32 as stored; quantized types come as float32. One tensor at a
        time is in memory. Arrays may be read-only views of the file.
        """

    def check_names(self, names: Iterable[str]) -> None:
        """Raise CorruptCheckpoint, naming tensor and file, unless all these tensors are stored."""
        missing = [name for name in names if name not in self.stored]
        if not missing:
            return
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        why = " while tie_word_embeddings is false" if missing[0] == "lm_head.weight" else ""
        raise CorruptCheckpoint(f"{self.listing}: tensor {missing[0]} is missing{more}{why}")

    def check_tensors(self) -> None:
        """Compare what is stored with what the config needs: nothing missing, misshapen or unknown.

        An unknown tensor means a variant of the architecture that would be computed wrongly.
        """
        needed = tensor_shapes(self.config)
        self.check_names(needed)
        for name, tensor in self.stored.items():
            if name in needed:
                if tensor.shape != needed[name]:
                    raise CorruptCheckpoint(
                        f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, but the "
                        f"config asks for {list(needed[name])}"
                    )
            elif not (is_derived(name) or name == "lm_head.weight"):
                raise UnsupportedModel(
                    f"{tensor.file}: tensor {name} has no place in a {self.config.family} model"
                )

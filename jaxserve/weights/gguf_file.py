"""The GGUF container: header, metadata, tensors as numpy arrays. Knows the format, never the model.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md). The gguf package provides
the type tables and the dequantization; the header is parsed here, because the package's reader
makes an array object for every token string (seconds for a vocabulary).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)
from gguf.quants import dequantize

from jaxserve.weights.errors import CorruptCheckpoint, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 counts in 32 bits
_SCALARS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        GGUFValueType.UINT8: np.dtype("<u1"),
        GGUFValueType.INT8: np.dtype("<i1"),
        GGUFValueType.UINT16: np.dtype("<u2"),
        GGUFValueType.INT16: np.dtype("<i2"),
        GGUFValueType.UINT32: np.dtype("<u4"),
        GGUFValueType.INT32: np.dtype("<i4"),
        GGUFValueType.FLOAT32: np.dtype("<f4"),
        GGUFValueType.UINT64: np.dtype("<u8"),
        GGUFValueType.INT64: np.dtype("<i8"),
        GGUFValueType.FLOAT64: np.dtype("<f8"),
        GGUFValueType.BOOL: np.dtype("?"),
    }
)
_PLAIN: Mapping[GGMLQuantizationType, np.dtype[Any]] = MappingProxyType(
    {
        GGMLQuantizationType.F32: np.dtype("<f4"),
        GGMLQuantizationType.F16: np.dtype("<f2"),
        GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    }
)
_CHUNK = 1 << 17  # values dequantized at once: few numpy calls, and temporaries stay in cache


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first: the reverse of the order in the file
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened file. `tensors` is in storage order; every one of them lies within the file."""

    path: Path
    metadata: Mapping[str, Any]  # str, int, float, bool, or a list of one of them
    tensors: tuple[GGUFTensor, ...]
    data: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map the file and read its header.

        Raises CorruptCheckpoint for anything but a whole GGUF file, UnsupportedModel (by name) for
        a version, byte order, value type or tensor type that is not read.
        """
        try:
            with path.open("rb") as file:
                if file.read(4) != _MAGIC:
                    raise CorruptCheckpoint(f"{path} is not a GGUF file: it does not start so")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
        return cls(path, *_Header(path, data).read(), data)

    def read(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor: a read-only view for F32, F16 and BF16, float32 for quantized types."""
        plain = _PLAIN.get(tensor.type)
        if plain is not None:
            values = np.frombuffer(self.data, plain, prod(tensor.shape), tensor.offset)
            return values.reshape(tensor.shape)
        per_block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        raw = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.offset)
        out = np.empty(prod(tensor.shape), np.float32)
        step = max(1, _CHUNK // per_block)  # blocks
        for first in range(0, len(raw) // block_bytes, step):
            blocks = raw[first * block_bytes : (first + step) * block_bytes]
            values = dequantize(blocks[None, :], tensor.type)[0]
            out[first * per_block : first * per_block + len(values)] = values
        return out.reshape(tensor.shape)


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self._path, self._data, self._size = path, data, len(data)
        self._at = len(_MAGIC)

    def read(self) -> tuple[dict[str, Any], tuple[GGUFTensor, ...]]:
        try:
            version = self._unpack("<I")
            if version not in _VERSIONS:
                swapped = " (big-endian)" if version & 0xFFFF == 0 else ""
                raise UnsupportedModel(f"{self._path}: GGUF version {version:#x}{swapped}")
            num_tensors, num_pairs = self._unpack("<Q"), self._unpack("<Q")
            metadata = self._metadata(num_pairs)
            tensors = self._tensors(num_tensors, metadata)
        except struct.error:
            raise self._truncated("ends inside its header") from None
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{self._path}: a string is not UTF-8: {error}") from None
        return metadata, tensors

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise CorruptCheckpoint(f"{self._path}: metadata key {key} appears twice")
            metadata[key] = self._value(key, self._unpack("<I"))
        return metadata

    def _tensors(self, count: int, metadata: dict[str, Any]) -> tuple[GGUFTensor, ...]:
        found = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CorruptCheckpoint(
                f"{self._path}: general.alignment = {alignment!r} is not a power of two"
            )
        start = -(-self._at // alignment) * alignment
        readable = {kind for kind in {kind for _, kind, _, _ in found} if _is_readable(kind)}
        names: set[str] = set()
        tensors: list[GGUFTensor] = []
        for name, kind, shape, offset in found:
            if name in names:
                raise CorruptCheckpoint(f"{self._path}: tensor {name} appears twice")
            names.add(name)
            if kind not in readable:
                raise UnsupportedModel(
                    f"{self._path}: tensor {name} has type {kind.name}: not supported"
                )
            tensor = GGUFTensor(
                name, kind, shape, start + offset, self._num_bytes(name, kind, shape)
            )
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise self._truncated(f"tensor {name} ends at byte {end}")
            tensors.append(tensor)
        return tuple(sorted(tensors, key=lambda t: t.offset))

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        num_dims = self._unpack("<I")
        if not 1 <= num_dims <= 4:
            raise CorruptCheckpoint(f"{self._path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([self._unpack("<Q") for _ in range(num_dims)]))
        if 0 in shape:
            raise CorruptCheckpoint(f"{self._path}: tensor {name} has shape {list(shape)}")
        code = self._unpack("<I")
        if code not in GGMLQuantizationType:
            raise UnsupportedModel(f"{self._path}: tensor {name} has unknown type {code}")
        return name, GGMLQuantizationType(code), shape, self._unpack("<Q")

    def _num_bytes(self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block:
            raise CorruptCheckpoint(
                f"{self._path}: tensor {name} has rows of {shape[-1]}, not a multiple of the "
                f"{per_block} of a {kind.name} block"
            )
        return prod(shape) // per_block * block_bytes

    def _value(self, key: str, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            item, count = self._unpack("<I"), self._unpack("<Q")
            if item == GGUFValueType.STRING:
                return self._strings(count)
            return self._numbers(key, item, count).tolist()
        return self._numbers(key, kind, 1).tolist()[0]

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise UnsupportedModel(f"{self._path}: metadata key {key} has value type {kind}")
        if count * dtype.itemsize > self._size - self._at:
            raise self._truncated(f"metadata key {key} has {count} values")
        values = np.frombuffer(self._data, dtype, count, self._at)
        self._at += values.nbytes
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # Locals and one loop: a vocabulary with its merges is 300,000 strings.
        data, at, size, unpack = self._data, self._at, self._size, struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > size:
                raise self._truncated(f"a string ends at byte {at}")
            strings.append(str(data[start:at], "utf-8"))
        self._at = at
        return strings

    def _unpack(self, code: str) -> int:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _truncated(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self._path} is truncated or damaged: {what}, the file has {self._size} bytes"
        )


def _is_readable(kind: GGMLQuantizationType) -> bool:
    if kind in _PLAIN:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True

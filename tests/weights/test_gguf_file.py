"""The GGUF container: values of every type, and every way a file can be damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from jaxserve.weights.errors import CorruptCheckpoint, UnsupportedModel
from jaxserve.weights.gguf_file import GGUFFile

VALUES = np.arange(96, dtype=np.float32).reshape(3, 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small sound file: a value of each type, two tensors."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("k.u8", 255)
    writer.add_int8("k.i8", -128)
    writer.add_uint16("k.u16", 65535)
    writer.add_int16("k.i16", -32768)
    writer.add_uint32("k.u32", 2**32 - 1)
    writer.add_int32("k.i32", -(2**31))
    writer.add_uint64("k.u64", 2**64 - 1)
    writer.add_int64("k.i64", -(2**63))
    writer.add_float32("k.f32", 0.25)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.str", "naïve 漢字 🙂")
    writer.add_array("k.strings", ["", "Ġa", "漢"])
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, -1.5])
    writer.add_array("k.bools", [True, False])
    writer.add_tensor("a", VALUES)
    writer.add_tensor("b", -VALUES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_of_every_type(path: Path) -> None:
    metadata = {k: v for k, v in GGUFFile.open(path).metadata.items() if k.startswith("k.")}
    assert metadata == {
        "k.u8": 255,
        "k.i8": -128,
        "k.u16": 65535,
        "k.i16": -32768,
        "k.u32": 2**32 - 1,
        "k.i32": -(2**31),
        "k.u64": 2**64 - 1,
        "k.i64": -(2**63),
        "k.f32": 0.25,
        "k.f64": 0.1,
        "k.bool": True,
        "k.str": "naïve 漢字 🙂",
        "k.strings": ["", "Ġa", "漢"],
        "k.ints": [1, -2, 3],
        "k.floats": [0.5, -1.5],
        "k.bools": [True, False],
    }
    assert metadata["k.bool"] is True
    assert {type(v) for v in metadata.values()} == {int, float, bool, str, list}


def test_tensors(path: Path) -> None:
    file = GGUFFile.open(path)
    assert [t.name for t in file.tensors] == ["a", "b"]
    np.testing.assert_array_equal(file.read(file.tensors[0]), VALUES)
    np.testing.assert_array_equal(file.read(file.tensors[1]), -VALUES)


def test_every_truncation_is_noticed_when_opening(path: Path) -> None:
    whole = path.read_bytes()
    last = GGUFFile.open(path).tensors[-1]
    end = last.offset + last.num_bytes
    for size in [*range(0, end, 7), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpoint, match=str(path)):
            GGUFFile.open(path)
    path.write_bytes(whole[:end])
    assert len(GGUFFile.open(path).tensors) == 2


def test_truncated_tensor_data_names_the_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: GGUFFile.open(path).tensors[1].offset + 100])
    with pytest.raises(CorruptCheckpoint, match=r"truncated.*tensor b ends at byte \d+") as error:
        GGUFFile.open(path)
    assert str(path.stat().st_size) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 a zip file", b"\x80\x02 a pickle"])
def test_not_a_gguf_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="is not a GGUF file"):
        GGUFFile.open(path)


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        GGUFFile.open(tmp_path)


@pytest.mark.parametrize(
    ("version", "word"), [(1, "version 0x1"), (4, "version 0x4"), (3 << 24, "big-endian")]
)
def test_other_versions_are_refused(version: int, word: str, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", version)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=word):
        GGUFFile.open(path)


def _header(pairs: bytes = b"", num_pairs: int = 0, tensors: bytes = b"", num: int = 0) -> bytes:
    """A file by hand, with room for 1 KiB of data."""
    return b"GGUF" + struct.pack("<IQQ", 3, num, num_pairs) + pairs + tensors + bytes(1024)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _pair(key: bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        _text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


HUGE = struct.pack("<Q", 2**63)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (_header(_pair(b"k", GGUFValueType.STRING, HUGE), 1), "a string ends at byte"),
        (
            _header(_pair(b"k", GGUFValueType.ARRAY, struct.pack("<I", 4) + HUGE), 1),
            "metadata key k has 9223372036854775808 values",
        ),
        (
            _header(_pair(b"k", GGUFValueType.ARRAY, struct.pack("<I", 8) + HUGE), 1),
            "ends inside its header",
        ),
        (_header(num_pairs=2**62), "ends inside its header|appears twice"),
        (_header(_pair(b"k", GGUFValueType.STRING, _text(b"\xff")), 1), "not UTF-8"),
        (_header(_pair(b"k", 4, bytes(4)) * 2, 2), "key k appears twice"),
        (_header(tensors=_tensor(b"t", [32]) * 2, num=2), "tensor t appears twice"),
        (_header(tensors=_tensor(b"t", [2**40, 2**40]), num=1), "tensor t ends at byte"),
        (_header(tensors=_tensor(b"t", [8], offset=2**62), num=1), "tensor t ends at byte"),
        (_header(tensors=_tensor(b"t", [0]), num=1), r"tensor t has shape \[0\]"),
        (_header(tensors=_tensor(b"t", [1] * 5), num=1), "tensor t has 5 dimensions"),
        (_header(tensors=_tensor(b"t", [31], kind=8), num=1), "tensor t has rows of 31"),
        (
            _header(_pair(b"general.alignment", 4, struct.pack("<I", 24)), 1),
            "general.alignment = 24",
        ),
    ],
)
def test_damaged_headers(data: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=word):
        GGUFFile.open(path)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (_header(tensors=_tensor(b"t", [32], kind=999), num=1), "tensor t has unknown type 999"),
        (_header(tensors=_tensor(b"t", [32], kind=26), num=1), "tensor t has type I32"),
        (_header(_pair(b"k", 77, bytes(8)), 1), "key k has value type 77"),
        (
            _header(_pair(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(16)), 1),
            "key k has value type 9",
        ),
    ],
)
def test_unknown_types_are_refused_by_name(data: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=word):
        GGUFFile.open(path)


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", VALUES)
    writer.add_tensor("b", -VALUES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "x.gguf")
    assert all(tensor.offset % 256 == 0 for tensor in file.tensors)
    np.testing.assert_array_equal(file.read(file.tensors[1]), -VALUES)

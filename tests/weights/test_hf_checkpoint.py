"""Hugging Face directories: whole, sharded, and broken in every way we know."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.weights.checkpoint import GenerationDefaults
from jaxserve.weights.errors import (
    CorruptCheckpoint,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from jaxserve.weights.hf_checkpoint import HFCheckpoint
from jaxserve.weights.names import tensor_shapes
from jaxserve.weights.open import open_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def tensors(configs, make_tensors) -> dict[str, np.ndarray]:
    return make_tensors(configs["llama"])


@pytest.fixture
def whole(tmp_path: Path, configs, tensors, write_hf) -> Path:
    return write_hf(tmp_path / "tiny", configs["llama"], tensors)


@pytest.fixture
def sharded(tmp_path: Path, configs, tensors, write_hf) -> Path:
    return write_hf(tmp_path / "shards", configs["llama"], tensors, shards=3)


def _fails(directory: Path, kind: type[ModelError], *words: str) -> None:
    with pytest.raises(kind) as error:
        open_checkpoint(str(directory))
    for word in words:
        assert word in str(error.value)


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_come_as_stored(
    dtype: Any, shards: int, tmp_path: Path, configs, make_tensors, write_hf
) -> None:
    tensors = make_tensors(configs["llama"], dtype)
    checkpoint = open_checkpoint(
        str(write_hf(tmp_path / "tiny", configs["llama"], tensors, shards))
    )
    assert checkpoint.name == "tiny"
    shapes = tensor_shapes(checkpoint.config)
    seen = []
    for name, values in checkpoint.tensors():
        seen.append(name)
        assert values.dtype == dtype
        assert values.shape == shapes[name]
        np.testing.assert_array_equal(values, tensors[name], err_msg=name)
    assert sorted(seen) == sorted(shapes)


def test_tensors_come_in_storage_order(whole: Path) -> None:
    raw = (whole / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__", None)
    stored = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert [name for name, _ in open_checkpoint(str(whole)).tensors()] == stored


def test_derived_tensors_are_left_out(whole: Path, tensors) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float64)}
    save_file(tensors | extra, whole / "model.safetensors")
    assert {name for name, _ in open_checkpoint(str(whole)).tensors()} == tensors.keys()


def test_missing_tensor(whole: Path, tensors) -> None:
    del tensors[UP]
    save_file(tensors, whole / "model.safetensors")
    _fails(whole, CorruptCheckpoint, str(whole / "model.safetensors"), UP, "is missing")


def test_missing_head(whole: Path, tensors) -> None:
    del tensors["lm_head.weight"]
    save_file(tensors, whole / "model.safetensors")
    _fails(
        whole,
        CorruptCheckpoint,
        "model.safetensors",
        "lm_head.weight is missing",
        "tie_word_embeddings is false",
    )
    _edit_config(whole, tie_word_embeddings=True)
    assert open_checkpoint(str(whole)).config.tie_word_embeddings


def test_tied_head_stored_again_is_left_out(whole: Path, tensors) -> None:
    _edit_config(whole, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, whole / "model.safetensors")
    checkpoint = open_checkpoint(str(whole))
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in dict(checkpoint.tensors())


def test_a_tied_head_that_differs_is_not_tied(whole: Path, tensors) -> None:
    _edit_config(whole, tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(whole))
    assert not checkpoint.config.tie_word_embeddings
    np.testing.assert_array_equal(
        dict(checkpoint.tensors())["lm_head.weight"], tensors["lm_head.weight"]
    )


def test_wrong_shape(whole: Path, tensors) -> None:
    tensors[UP] = tensors[UP].T.copy()
    save_file(tensors, whole / "model.safetensors")
    _fails(whole, CorruptCheckpoint, "model.safetensors", UP, "[64, 128]", "[128, 64]")


def test_unknown_tensor(whole: Path, tensors) -> None:
    name = "model.layers.0.self_attn.sinks"
    save_file(tensors | {name: np.ones(4, np.float32)}, whole / "model.safetensors")
    _fails(whole, UnsupportedModel, "model.safetensors", name, "llama")


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.float64], ids=["f8", "i8", "f64"]
)
def test_other_dtypes_are_refused_by_name(dtype: Any, whole: Path, tensors) -> None:
    name = {"float8_e4m3fn": "F8_E4M3", "int8": "I8", "float64": "F64"}[np.dtype(dtype).name]
    tensors[UP] = tensors[UP].astype(dtype)
    save_file(tensors, whole / "model.safetensors")
    _fails(whole, UnsupportedModel, "model.safetensors", UP, name)


def test_every_truncation_is_noticed_when_opening(whole: Path) -> None:
    file = whole / "model.safetensors"
    data = file.read_bytes()
    for size in [0, 4, 8, 50, 1000, len(data) // 2, len(data) - 1]:
        file.write_bytes(data[:size])
        _fails(whole, CorruptCheckpoint, str(file), "truncated or damaged")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    _fails(
        sharded,
        CorruptCheckpoint,
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors is missing",
    )


def test_truncated_shard(sharded: Path) -> None:
    file = sharded / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    _fails(sharded, CorruptCheckpoint, str(file), "truncated or damaged")


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    twice = load_file(second)
    save_file(load_file(first) | twice, first)
    _fails(sharded, CorruptCheckpoint, next(iter(sorted(twice))).split(".")[0], "is also in")


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    file = sharded / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, file)
    _fails(
        sharded,
        CorruptCheckpoint,
        "model.safetensors.index.json",
        "model.embed_tokens.weight is missing",
    )


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "'../a.safetensors' is not a file name"),
        ('{"weight_map": {"a": ".."}}', "is missing"),
        ('{"weight_map": ["a"]}', "weight_map"),
    ],
)
def test_bad_index(index: str, word: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    _fails(sharded, CorruptCheckpoint, "model.safetensors.index.json", word)


@pytest.mark.parametrize("text", ["", "{", "\ufeff{}", "[1]", '"llama"'])
def test_bad_config(text: str, whole: Path) -> None:
    (whole / "config.json").write_text(text)
    _fails(whole, CorruptCheckpoint, str(whole / "config.json"), "JSON")


def test_config_that_is_not_text(whole: Path) -> None:
    (whole / "config.json").write_bytes(b"\xff\xfe\x00")
    _fails(whole, CorruptCheckpoint, str(whole / "config.json"), "JSON")


def test_quantization_config_is_refused_by_name(whole: Path) -> None:
    _edit_config(whole, quantization_config={"quant_method": "fp8"})
    _fails(whole, UnsupportedModel, str(whole / "config.json"), "quantization_config", "fp8")


def test_directory_without_config(tmp_path: Path) -> None:
    _fails(tmp_path, ModelNotFound, str(tmp_path), "config.json")
    (tmp_path / "model.Q4_0.gguf").touch()
    _fails(tmp_path, ModelNotFound, "model.Q4_0.gguf")


def test_directory_without_weights(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    _fails(whole, ModelNotFound, str(whole), "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_torch_files_are_refused(name: str, whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    (whole / name).touch()
    _fails(whole, UnsupportedModel, str(whole / name), "convert", "safetensors")


def test_generation_defaults_are_the_union(whole: Path) -> None:
    assert open_checkpoint(str(whole)).generation == GenerationDefaults((2,), bos_token_id=1)
    generation = {"eos_token_id": [5, 2], "temperature": "what nobody reads can't be wrong"}
    (whole / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = {
        "eos_token": {"content": "<|im_end|>", "special": True},
        "added_tokens_decoder": {"8": {"content": "<pad>"}, "9": {"content": "<|im_end|>"}},
    }
    (whole / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert open_checkpoint(str(whole)).generation == GenerationDefaults((5, 2, 9), bos_token_id=1)


def test_end_token_of_the_tokenizer_file(whole: Path) -> None:
    (whole / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert open_checkpoint(str(whole)).generation.eos_token_ids == (2,)
    added = {"added_tokens": [{"id": 0, "content": "<s>"}, {"id": 3, "content": "</s>"}]}
    (whole / "tokenizer.json").write_text(json.dumps(added))
    assert open_checkpoint(str(whole)).generation.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"eos_token_id": "2"}, "eos_token_id = '2'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id = [2, -1]"),
    ],
)
def test_bad_generation_config(content: dict, word: str, whole: Path) -> None:
    (whole / "generation_config.json").write_text(json.dumps(content))
    _fails(whole, CorruptCheckpoint, str(whole / "generation_config.json"), word)


def test_check_names(whole: Path) -> None:
    checkpoint = open_checkpoint(str(whole))
    assert isinstance(checkpoint, HFCheckpoint)
    checkpoint.check_names(["model.norm.weight", "lm_head.weight"])
    with pytest.raises(CorruptCheckpoint, match=r"tensor x is missing \(and 1 more\)"):
        checkpoint.check_names(["x", "model.norm.weight", "y"])

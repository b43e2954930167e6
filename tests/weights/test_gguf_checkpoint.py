"""GGUF checkpoints hold the same model as safetensors: names, shapes, q/k order, dtypes."""

from __future__ import annotations

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import inverse_frequencies
from jaxserve.weights.checkpoint import GenerationDefaults
from jaxserve.weights.errors import CorruptCheckpoint, UnsupportedModel
from jaxserve.weights.gguf_checkpoint import GGUFCheckpoint
from jaxserve.weights.names import tensor_shapes
from jaxserve.weights.open import open_checkpoint


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_safetensors(
    family: str, tmp_path: Path, configs, make_tensors, write_hf, write_gguf
) -> None:
    raw = configs[family]
    tensors = make_tensors(raw)
    hf = open_checkpoint(str(write_hf(tmp_path / "hf", raw, tensors)))
    gguf = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", raw, tensors)))
    assert gguf.config == hf.config == ModelConfig.from_hf(raw)
    assert gguf.generation == hf.generation == GenerationDefaults((2,), 1)
    left, right = dict(hf.tensors()), dict(gguf.tensors())
    assert left.keys() == right.keys() == tensor_shapes(hf.config).keys()
    for name in left:
        assert left[name].dtype == right[name].dtype == np.float32
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
        np.testing.assert_array_equal(left[name], tensors[name], err_msg=name)


def test_permutation_of_biases_is_undone(tmp_path: Path, configs, make_tensors, write_gguf) -> None:
    raw = configs["llama"] | {"attention_bias": True}
    tensors = make_tensors(raw)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", raw, tensors)))
    assert checkpoint.config.qkv_bias
    assert checkpoint.config.output_bias
    for name, values in checkpoint.tensors():
        np.testing.assert_array_equal(values, tensors[name], err_msg=name)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Kind.F16, np.dtype(np.float16)), (Kind.BF16, np.dtype(ml_dtypes.bfloat16))],
)
def test_half_types_come_as_stored(
    kind: Kind, dtype: np.dtype, tmp_path: Path, configs, make_tensors, write_gguf
) -> None:
    raw = configs["llama"]
    tensors = make_tensors(raw)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", raw, tensors, kind)))
    for name, values in checkpoint.tensors():
        expected = tensors[name] if values.ndim == 1 else tensors[name].astype(dtype)
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "tolerance"),  # half a step of the scale of a block of normal values, and room
    [(Kind.Q8_0, 0.03), (Kind.Q4_0, 0.5), (Kind.Q4_1, 0.35), (Kind.Q5_0, 0.25)],
)
def test_quantized_types_come_as_float32(
    kind: Kind, tolerance: float, tmp_path: Path, configs, make_tensors, write_gguf
) -> None:
    raw = configs["llama"]
    tensors = make_tensors(raw)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", raw, tensors, kind)))
    for name, values in checkpoint.tensors():
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, tensors[name], atol=tolerance, err_msg=name)
    # exactly what the gguf package makes of the same rows, over more than one chunk
    wide = np.random.default_rng(1).normal(size=(600, 256)).astype(np.float32)
    raw = raw | {"vocab_size": 600, "hidden_size": 256, "num_key_value_heads": 4}
    tensors = make_tensors(raw) | {"model.embed_tokens.weight": wide}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "wide.gguf", raw, tensors, kind)))
    got = dict(checkpoint.tensors())["model.embed_tokens.weight"]
    np.testing.assert_array_equal(got, dequantize(quantize(wide, kind), kind))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.IQ4_NL])
def test_types_that_only_dequantize(kind: Kind, tmp_path: Path) -> None:
    """Blocks of random bytes with sane float16 scales, as the gguf package decodes them."""
    block = {Kind.Q4_K: 144, Kind.Q6_K: 210, Kind.Q5_K: 176, Kind.IQ4_NL: 18}[kind]
    per_row = {Kind.IQ4_NL: 8}.get(kind, 1)
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (700 * per_row, block), np.uint8)
    scale = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    raw[:, 0:4] = scale
    if kind is Kind.Q6_K:
        raw[:, -2:] = scale[:2]
    if kind is Kind.IQ4_NL:
        raw[:, 2:4] = rng.integers(0, 256, (len(raw), 2))
    raw = raw.reshape(700, -1)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from jaxserve.weights.gguf_file import GGUFFile

    file = GGUFFile.open(tmp_path / "one.gguf")
    (tensor,) = file.tensors
    assert tensor.shape == (700, 256)
    got = file.read(tensor)
    assert got.std() > 0.01
    np.testing.assert_array_equal(got, dequantize(raw, kind))


def test_llama3_scaling_arrives_as_a_tensor(
    tmp_path: Path, configs, make_tensors, write_gguf
) -> None:
    """rope_freqs.weight, written as llama.cpp's converter derives it, turns like config.json's."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    raw = configs["llama"] | {"rope_scaling": scaling}
    factors = []
    for i in range(8):  # head_dim 16
        wavelength = 2 * np.pi * 10000.0 ** (2 * i / 16)
        if wavelength < 64 / 4:
            factors.append(1.0)
        elif wavelength > 64 / 1:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert [f in (1.0, 8.0) for f in factors] == [True] + 2 * [False] + 5 * [True]

    def edit(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    tensors = make_tensors(raw)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", raw, tensors, edit=edit)))
    rope = checkpoint.config.rope
    assert rope.kind == "factors"
    assert rope.factors == tuple(float(np.float32(f)) for f in factors)
    np.testing.assert_allclose(
        inverse_frequencies(rope, 16),
        inverse_frequencies(ModelConfig.from_hf(raw).rope, 16),
        rtol=2e-7,
    )
    assert {name for name, _ in checkpoint.tensors()} == tensors.keys()


def test_end_tokens_of_the_metadata(tmp_path: Path, configs, make_tensors, write_gguf) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)

    raw = configs["qwen3"]
    path = write_gguf(tmp_path / "tiny.gguf", raw, make_tensors(raw), edit=edit)
    expected = GenerationDefaults((2, 7), bos_token_id=1)
    assert open_checkpoint(str(path)).generation == expected


def test_missing_tensor_is_named(tmp_path: Path, configs, make_tensors, write_gguf) -> None:
    tensors = make_tensors(configs["llama"])
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", configs["llama"], tensors)
    with pytest.raises(CorruptCheckpoint) as error:
        open_checkpoint(str(path))
    assert f"{path}: tensor model.layers.1.mlp.up_proj.weight is missing" in str(error.value)


def test_wrong_shape_is_named(tmp_path: Path, configs, make_tensors, write_gguf) -> None:
    tensors = make_tensors(configs["llama"])
    raw = configs["llama"] | {"vocab_size": 95}
    path = write_gguf(tmp_path / "tiny.gguf", raw, tensors)
    with pytest.raises(CorruptCheckpoint, match=r"embed_tokens.* shape \[96, 64\].*\[95, 64\]"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "rope_factors_long.weight"])
def test_unknown_tensor_is_refused_by_name(
    name: str, tmp_path: Path, configs, make_tensors, write_gguf
) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_tensor(name, np.ones(4, np.float32))

    raw = configs["llama"]
    path = write_gguf(tmp_path / "tiny.gguf", raw, make_tensors(raw), edit=edit)
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(str(path))


def test_split_file_is_refused(tmp_path: Path, configs, make_tensors, write_gguf) -> None:
    raw = configs["llama"]
    path = write_gguf(
        tmp_path / "tiny.gguf",
        raw,
        make_tensors(raw),
        edit=lambda writer: writer.add_uint16("split.count", 3),
    )
    with pytest.raises(UnsupportedModel, match=r"split\.count = 3"):
        open_checkpoint(str(path))


def test_bundled_model() -> None:
    checkpoint = open_checkpoint(None)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert checkpoint.generation == GenerationDefaults((2,), bos_token_id=1)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.rms_norm_eps, config.rope.theta) == (1e-5, 1e5)
    assert config.tie_word_embeddings
    metadata = checkpoint.file.metadata
    assert metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert len(metadata["tokenizer.ggml.merges"]) == 48900
    assert metadata["general.languages"] == ["en"]
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def test_bundled_tensors() -> None:
    """Against whole-tensor dequantization by the gguf package of the same bytes."""
    checkpoint = open_checkpoint(None)
    assert isinstance(checkpoint, GGUFCheckpoint)
    stored = {}
    for tensor in checkpoint.file.tensors[:12]:
        raw = np.frombuffer(checkpoint.file.data, np.uint8, tensor.num_bytes, tensor.offset)
        rows = raw.reshape(tensor.shape[0], -1)[:576]  # enough of the embedding, all of the rest
        stored[tensor.name] = dequantize(rows, tensor.type)
    got = dict(itertools.islice(checkpoint.tensors(), 12))
    for ours, name in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
    ]:
        expected = stored[name].reshape(-1, *got[ours].shape[1:])
        np.testing.assert_array_equal(got[ours][:576], expected, ours)
    # q: rows (2j, 2j + 1) of a head in the file are rows (j, j + 32) here
    q, pairs = got["model.layers.0.self_attn.q_proj.weight"], stored["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(q[64 + 5], pairs[64 + 10])
    np.testing.assert_array_equal(q[64 + 32 + 5], pairs[64 + 11])

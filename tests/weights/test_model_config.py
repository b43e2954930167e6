"""config.json and GGUF metadata to ModelConfig; refusals by name."""

from __future__ import annotations

import pytest

from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.weights.errors import CorruptCheckpoint, ModelError, UnsupportedModel

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
MISTRAL_7B_V03 = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def _sizes(config: ModelConfig) -> tuple[int, ...]:
    return (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.max_position,
    )


@pytest.mark.parametrize(
    ("raw", "sizes", "rope"),
    [
        (LLAMA_31_8B, (128256, 4096, 14336, 32, 32, 8, 128, 131072), LLAMA3_ROPE),
        (SMOLLM2_135M, (49152, 576, 1536, 30, 9, 3, 64, 8192), RopeConfig(1e5)),
        (MISTRAL_7B_V03, (32768, 4096, 14336, 32, 32, 8, 128, 32768), RopeConfig(1e6)),
        (QWEN25_7B, (152064, 3584, 18944, 28, 28, 4, 128, 131072), RopeConfig(1e6)),
        (QWEN3_8B, (151936, 4096, 12288, 36, 32, 8, 128, 40960), RopeConfig(1e6)),
        (QWEN3_06B, (151936, 1024, 3072, 28, 16, 8, 128, 40960), RopeConfig(1e6)),
    ],
    ids=["llama31-8b", "smollm2-135m", "mistral-7b", "qwen25-7b", "qwen3-8b", "qwen3-06b"],
)
def test_public_configs(raw: dict, sizes: tuple[int, ...], rope: RopeConfig) -> None:
    config = ModelConfig.from_hf(raw)
    assert _sizes(config) == sizes
    assert config.rope == rope
    assert config.family == raw["model_type"]
    assert config.rms_norm_eps == raw["rms_norm_eps"]
    assert config.tie_word_embeddings is raw["tie_word_embeddings"]
    assert config.qkv_bias is (raw["model_type"] == "qwen2")
    assert config.qk_norm is (raw["model_type"] == "qwen3")
    assert not config.output_bias
    assert not config.mlp_bias


def test_attention_and_mlp_bias_of_llama() -> None:
    config = ModelConfig.from_hf(SMOLLM2_135M | {"attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


def test_transformers_5_rope_parameters_equal_transformers_4() -> None:
    old = {k: v for k, v in LLAMA_31_8B.items() if k not in ("rope_scaling", "rope_theta")}
    new = old | {"rope_parameters": LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(LLAMA_31_8B)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_rope(key: str) -> None:
    config = ModelConfig.from_hf(SMOLLM2_135M | {"rope_scaling": {key: "linear", "factor": 4}})
    assert config.rope == RopeConfig(1e5, "linear", 4.0)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("llama", "absent"),
        ("mistral", "absent"),  # transformers 5 itself refuses null here
        ("qwen2", "absent"),
        ("qwen3", "absent"),
        ("llama", "null"),
        ("qwen2", "null"),
        ("qwen3", "null"),
    ],
)
def test_defaults_are_those_of_transformers(family: str, left_out: str) -> None:
    """Absent and null differ: a class default, or derived from the other sizes."""
    from transformers import CONFIG_MAPPING

    bare = {
        "model_type": family,
        "vocab_size": 1000,
        "hidden_size": 2048,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "sliding_window": None,
    }
    if left_out == "null":
        bare["num_key_value_heads"] = None
    theirs = CONFIG_MAPPING[family](**bare)
    ours = ModelConfig.from_hf(bare)
    derived = 2048 // 32
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", derived)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (LLAMA_31_8B, {"model_type": "gemma2"}, ["model_type", "gemma2", "llama"]),
        (LLAMA_31_8B, {"model_type": None}, ["model_type", "None"]),
        (LLAMA_31_8B, {"model_type": ["llama"]}, ["model_type"]),
        (
            LLAMA_31_8B,
            {"architectures": ["LlamaForSequenceClassification"]},
            ["architectures", "LlamaForSequenceClassification"],
        ),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (LLAMA_31_8B, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        (LLAMA_31_8B, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        (LLAMA_31_8B, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            LLAMA_31_8B,
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ["quantization_config", "gptq"],
        ),
        (
            MISTRAL_7B_V03,
            {"sliding_window": 4096},
            ["sliding_window", "4096", "window"],
        ),
        (QWEN25_7B, {"use_sliding_window": True}, ["use_sliding_window", "True"]),
        (
            QWEN3_8B,
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention"],
        ),
        (QWEN25_7B, {"dual_chunk_attention_config": {"chunk_size": 8}}, ["dual_chunk", "8"]),
        (LLAMA_31_8B, {"num_key_value_heads": 5}, ["32", "5", "key-value heads"]),
        (LLAMA_31_8B, {"num_attention_heads": 24}, ["hidden_size", "4096", "24"]),
        (QWEN3_8B, {"head_dim": 127}, ["127", "odd"]),
    ],
)
def test_refused_by_name(base: dict, change: dict, words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as error:
        ModelConfig.from_hf(base | change, "here/config.json")
    for word in ["here/config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "kind", ["yarn", "dynamic", "longrope", "su", "mrope", "proportional", ["x"]]
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_unknown_rope_types_are_refused_by_name(kind: object, key: str) -> None:
    raw = QWEN3_8B | {"rope_scaling": None, key: {"rope_type": kind, "factor": 4.0}}
    with pytest.raises(UnsupportedModel) as error:
        ModelConfig.from_hf(raw)
    assert f"config.json: {key}: rope_type = {kind!r}" in str(error.value)


def test_rope_by_layer_type_is_refused() -> None:
    raw = QWEN3_8B | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    with pytest.raises(UnsupportedModel, match="full_attention"):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize("window", [None, 32768, 65536])
def test_a_window_over_the_whole_context_is_none(window: int | None) -> None:
    config = ModelConfig.from_hf(MISTRAL_7B_V03 | {"sliding_window": window})
    assert config == ModelConfig.from_hf(MISTRAL_7B_V03)


def test_mistral_without_the_key_has_the_window_of_transformers() -> None:
    raw = {k: v for k, v in MISTRAL_7B_V03.items() if k != "sliding_window"}
    with pytest.raises(UnsupportedModel, match="4096"):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": "4096"}, "hidden_size = '4096'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"num_attention_heads": -1}, "num_attention_heads = -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"layer_types": 3}, "layer_types = 3"),
        (
            {"rope_scaling": LLAMA_31_8B["rope_scaling"] | {"low_freq_factor": 4.0}},
            "high_freq_factor = 4.0",
        ),
    ],
)
def test_senseless_values(change: dict, word: str) -> None:
    with pytest.raises(CorruptCheckpoint) as error:
        ModelConfig.from_hf(LLAMA_31_8B | change)
    assert f"config.json: {word}" in str(error.value).replace("rope_scaling: ", "")


GGUF_QWEN3 = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 28,
    "qwen3.context_length": 40960,
    "qwen3.embedding_length": 1024,
    "qwen3.feed_forward_length": 3072,
    "qwen3.attention.head_count": 16,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.value_length": 128,
    "qwen3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "qwen3.rope.freq_base": 1000000.0,
    "tokenizer.ggml.tokens": ["x"] * 151936,
}
GGUF_LLAMA = {
    key.replace("qwen3", "llama"): "llama" if value == "qwen3" else value
    for key, value in GGUF_QWEN3.items()
}


def test_gguf_metadata_equals_config_json() -> None:
    assert ModelConfig.from_gguf(GGUF_QWEN3, {"token_embd.weight"}) == ModelConfig.from_hf(
        QWEN3_06B
    )


def test_gguf_biases_and_head_follow_the_tensors() -> None:
    names = {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"}
    config = ModelConfig.from_gguf(GGUF_LLAMA, names)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({}, RopeConfig(1e6)),
        ({"llama.rope.scaling.type": "none"}, RopeConfig(1e6)),
        (
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0},
            RopeConfig(1e6),
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            RopeConfig(1e6, "linear", 2.5),
        ),
        ({"llama.rope.scaling.factor": 2.0}, RopeConfig(1e6, "linear", 2.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig(1e6, "linear", 2.0)),
        ({"llama.rope.scaling.factor": 0.0}, RopeConfig(1e6)),
    ],
)
def test_gguf_rope_scaling(change: dict, rope: RopeConfig) -> None:
    assert ModelConfig.from_gguf(GGUF_LLAMA | change, ()).rope == rope


def test_gguf_sizes_may_be_lists_when_all_layers_agree() -> None:
    listed = GGUF_LLAMA | {"llama.attention.head_count_kv": [8] * 28}
    assert ModelConfig.from_gguf(listed, ()) == ModelConfig.from_gguf(GGUF_LLAMA, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gemma3"),
        ("general.architecture", ["llama"]),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.attention.sliding_window", 4096),
        ("llama.expert_count", 8),
        ("llama.attention.head_count_kv", [8, 4]),
        ("llama.rope.dimension_count", 64),
        ("llama.attention.value_length", 64),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.attention.causal", False),
    ],
)
def test_gguf_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel) as error:
        ModelConfig.from_gguf(GGUF_LLAMA | {key: value}, (), source="x.gguf")
    assert f"x.gguf: {key} = {value!r}" in str(error.value)


def test_gguf_missing_size_is_named() -> None:
    short = {k: v for k, v in GGUF_LLAMA.items() if k != "llama.block_count"}
    with pytest.raises(CorruptCheckpoint, match=r"llama\.block_count is missing"):
        ModelConfig.from_gguf(short, ())


@pytest.mark.parametrize("factors", [(1.0,) * 63, (0.0,) * 64, (float("nan"),) * 64])
def test_gguf_rope_factors_must_fit(factors: tuple[float, ...]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"rope_freqs\.weight"):
        ModelConfig.from_gguf(GGUF_LLAMA, (), factors)


def test_model_errors_are_value_errors() -> None:
    assert issubclass(UnsupportedModel, ModelError)
    assert issubclass(ModelError, ValueError)

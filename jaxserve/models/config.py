"""What a model of the Llama family is made of: sizes, rope, biases. Plain values, never jax.

Read from a Hugging Face config.json or from GGUF metadata. Whatever would change the computation
and is not computed here is refused by name; nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np

from jaxserve.weights.errors import CorruptCheckpoint, UnsupportedModel
from jaxserve.weights.fields import Fields

FamilyName = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head, half-split pairs.

    factor belongs to linear and llama3; low_freq_factor, high_freq_factor and original_max_position
    to llama3. factors (head_dim / 2 of them) belongs to "factors": each divides its own frequency,
    which is how GGUF stores llama3 scaling.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: FamilyName
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """From the content of a config.json, written by transformers 4 or 5.

        Keys that it leaves out take the defaults of transformers' configuration class.
        Raises UnsupportedModel or CorruptCheckpoint; `source` is the file they name.
        """
        fields = Fields(source, config)
        model_type = fields.get("model_type")
        family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise fields.unsupported("model_type", f"is not one of {', '.join(_FAMILIES)}")
        if fields.get("architectures") not in (None, [], [family.architecture]):
            raise fields.unsupported("architectures", f"is not [{family.architecture!r}]")
        fields.require_neutral(_HF_NEUTRAL)
        if set(fields.get_list("layer_types")) - {"full_attention"}:
            raise fields.unsupported("layer_types", "has layers other than full_attention")

        max_position = fields.integer("max_position_embeddings", family.max_position)
        family.check_window(fields, max_position)
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads")
        # null means the derived value, absent the class's default: they differ for Mistral and Qwen
        kv_default = None if fields.has("num_key_value_heads") else family.num_kv_heads
        dim_default = None if fields.has("head_dim") else family.head_dim
        if fields.get("head_dim") is None and dim_default is None and hidden_size % num_heads:
            raise fields.unsupported(
                "hidden_size", f"is not a multiple of num_attention_heads = {num_heads}"
            )
        attention_bias = fields.flag("attention_bias", False)
        made = cls(
            family=cast(FamilyName, model_type),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", kv_default or num_heads),
            head_dim=fields.integer("head_dim", dim_default or hidden_size // num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope_from_hf(fields, max_position),
            max_position=max_position,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
        )
        return _checked(made, source)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_factors: tuple[float, ...] = (),
        source: str = "GGUF",
    ) -> ModelConfig:
        """From the metadata of a GGUF file (lists for arrays) and the names of its tensors.

        The presence of tensors says whether there are biases and whether the head is tied.
        rope_factors is the content of rope_freqs.weight, if there is one.
        Raises UnsupportedModel or CorruptCheckpoint; `source` is the file they name.
        """
        top = Fields(source, metadata)
        arch = top.get("general.architecture")
        if not isinstance(arch, str) or arch not in _GGUF_FAMILIES:
            raise top.unsupported(
                "general.architecture", f"is not one of {', '.join(sorted(_GGUF_FAMILIES))}"
            )
        family = _FAMILIES[arch]
        sizes = {f"{arch}.{key}": _uniform(top, f"{arch}.{key}") for key in _PER_LAYER}
        fields = Fields(source, {**metadata, **sizes})
        fields.require_neutral({f"{arch}.{key}": ok for key, ok in _GGUF_NEUTRAL.items()})

        max_position = fields.integer(f"{arch}.context_length")
        _refuse_window(fields, f"{arch}.attention.sliding_window", 0, max_position)
        hidden_size = fields.integer(f"{arch}.embedding_length")
        num_heads = fields.integer(f"{arch}.attention.head_count")
        head_dim = fields.integer(f"{arch}.attention.key_length", hidden_size // num_heads)
        for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
            if fields.integer(key, head_dim) != head_dim:
                raise fields.unsupported(key, f"differs from the head dimension {head_dim}")
        tokens = metadata.get("tokenizer.ggml.tokens") or ()
        made = cls(
            family=cast(FamilyName, arch),
            vocab_size=fields.integer(f"{arch}.vocab_size", len(tokens)),
            hidden_size=hidden_size,
            intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
            num_layers=fields.integer(f"{arch}.block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=_decimal(fields.number(f"{arch}.attention.layer_norm_rms_epsilon")),
            rope=_rope_from_gguf(fields, arch, head_dim, rope_factors),
            max_position=max_position,
            tie_word_embeddings="output.weight" not in tensor_names,
            qkv_bias=bool(family.qkv_bias) or "blk.0.attn_q.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_down.bias" in tensor_names,
            qk_norm=family.qk_norm,
        )
        return _checked(made, source)


def _refuse_window(fields: Fields, key: str, absent: int, max_position: int) -> None:
    """null and 0 mean no window; one that covers the whole context changes nothing."""
    if fields.get(key) == 0 or (fields.has(key) and fields.get(key) is None):
        return
    window = fields.integer(key, absent) if fields.has(key) else absent
    if 0 < window < max_position:
        raise fields.unsupported(
            key, f"turns a sliding window of {window} tokens on: not supported"
        )


def _no_window(fields: Fields, max_position: int) -> None:
    """Llama has no sliding window."""


def _mistral_window(fields: Fields, max_position: int) -> None:
    _refuse_window(fields, "sliding_window", 4096, max_position)


def _qwen_window(fields: Fields, max_position: int) -> None:
    if fields.flag("use_sliding_window", False):
        raise fields.unsupported("use_sliding_window")


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers' classes of this family fix, or assume where config.json is silent."""

    architecture: str
    max_position: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    qkv_bias: bool | None = False  # None: config.json's attention_bias decides
    output_bias: bool | None = False
    mlp_bias: bool = False  # True: config.json's mlp_bias decides
    qk_norm: bool = False
    check_window: Callable[[Fields, int], None] = _no_window


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family("LlamaForCausalLM", 2048, qkv_bias=None, output_bias=None, mlp_bias=True),
        "mistral": _Family(
            "MistralForCausalLM", 131072, num_kv_heads=8, check_window=_mistral_window
        ),
        "qwen2": _Family(
            "Qwen2ForCausalLM", 32768, num_kv_heads=32, qkv_bias=True, check_window=_qwen_window
        ),
        "qwen3": _Family(
            "Qwen3ForCausalLM",
            32768,
            num_kv_heads=32,
            head_dim=128,
            qkv_bias=None,
            output_bias=None,
            qk_norm=True,
            check_window=_qwen_window,
        ),
    }
)
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_GGUF_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})  # Mistral is "llama" there

# Keys that other variants of these architectures use, with the values that change nothing.
_HF_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "quantization_config": (),
        "compression_config": (),
        "partial_rotary_factor": (1.0,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "clip_qkv": (),
        "attention_multiplier": (),
        "query_pre_attn_scalar": (),
        "embedding_multiplier": (1.0,),
        "residual_multiplier": (1.0,),
        "logits_scaling": (1.0,),
        "logit_scale": (1.0,),
        "num_local_experts": (0,),
        "num_experts": (0,),
        "no_rope_layers": ([],),
        "no_rope_layer_interval": (),
        "dual_chunk_attention_config": (),
        "use_mrope": (False,),
        "is_causal": (True,),
        "use_bidirectional_attention": (False,),
    }
)
_GGUF_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "expert_count": (0,),
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "attention.scale": (0.0,),
        "attn_logit_softcapping": (0.0,),
        "final_logit_softcapping": (0.0,),
        "logit_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "embedding_scale": (0.0, 1.0),
        "use_parallel_residual": (False,),
        "nextn_predict_layers": (0,),
        "rope.dimension_sections": (),
        "rope.scaling.alpha": (0.0, 1.0),
        "rope.scaling.attn_factor": (1.0,),
    }
)


def _rope_from_hf(fields: Fields, max_position: int) -> RopeConfig:
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = Fields(f"{fields.source}: {key}", fields.table(key))
    rope.require_neutral({"partial_rotary_factor": (1.0,), "mrope_section": ()})
    for name, value in fields.table(key).items():
        if isinstance(value, dict):
            raise rope.unsupported(name, "differs by layer type: not supported")
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.get(name) or "default"
    if not isinstance(kind, str) or kind not in _HF_ROPES:
        raise rope.unsupported(name, f"is not one of {', '.join(_HF_ROPES)}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    return _HF_ROPES[kind](rope, theta, max_position)


def _default_rope(rope: Fields, theta: float, max_position: int) -> RopeConfig:
    return RopeConfig(theta)


def _linear_rope(rope: Fields, theta: float, max_position: int) -> RopeConfig:
    return RopeConfig(theta, "linear", rope.number("factor"))


def _llama3_rope(rope: Fields, theta: float, max_position: int) -> RopeConfig:
    made = RopeConfig(
        theta,
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )
    if made.high_freq_factor <= made.low_freq_factor:
        raise rope.corrupt(
            "high_freq_factor", f"is not above low_freq_factor = {made.low_freq_factor}"
        )
    return made


_HF_ROPES: Mapping[str, Callable[[Fields, float, int], RopeConfig]] = MappingProxyType(
    {"default": _default_rope, "linear": _linear_rope, "llama3": _llama3_rope}
)


def _rope_from_gguf(
    fields: Fields, arch: str, head_dim: int, factors: tuple[float, ...]
) -> RopeConfig:
    theta = _decimal(fields.number(f"{arch}.rope.freq_base", 10000.0))
    kind_key = f"{arch}.rope.scaling.type"
    kind = fields.get(kind_key) or "linear"  # llama.cpp's default: a bare factor is linear
    if kind not in ("none", "linear"):
        raise fields.unsupported(kind_key, "is not one of none, linear")
    scale = 1.0
    for key in (f"{arch}.rope.scale_linear", f"{arch}.rope.scaling.factor"):
        if kind == "linear" and fields.get(key):  # 0 means none
            scale = _decimal(fields.number(key))
    if factors:
        if len(factors) != head_dim // 2 or not all(0 < f < np.inf for f in factors):
            raise CorruptCheckpoint(
                f"{fields.source}: rope_freqs.weight is not {head_dim // 2} positive numbers, "
                f"one for each pair of the head dimension {head_dim}"
            )
        return RopeConfig(theta, "factors", factors=tuple(f * scale for f in factors))
    return RopeConfig(theta) if scale == 1.0 else RopeConfig(theta, "linear", scale)


def _uniform(fields: Fields, key: str) -> Any:
    """GGUF may store a size once for each layer: the size itself when all layers agree."""
    value = fields.get(key)
    if not isinstance(value, list):
        return value
    if not value or value.count(value[0]) != len(value):
        raise fields.unsupported(key, "differs by layer: not supported")
    return value[0]


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, where the format gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(
            f"{source}: {config.num_heads} attention heads are not a multiple of "
            f"{config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise UnsupportedModel(
            f"{source}: the head dimension {config.head_dim} is odd: rope turns pairs"
        )
    return config

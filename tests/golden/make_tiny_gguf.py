"""Writes tiny_gguf/: tiny models as GGUF files in each tensor type that the engine reads.

    /tmp/golden/bin/python tests/golden/make_tiny_gguf.py      (after make_tiny.py)

Sources are directories of tiny/, except for the K-quants: their rows are multiples of 256, and
their blocks are drawn at random, bit for bit, because the gguf package can read but not make them.
Numbers come from torch with the file's own weights, dequantized.
"""
# pyright: basic, reportMissingImports=false

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from make_tiny import CHAT_TEMPLATE, SPECIAL, STEPS, TINY, VOCAB, golden, random_prompts, spread
from torch_reference import gguf_name, model_from_gguf, to_interleaved, write_golden
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FOLDER = Path(__file__).parent / "tiny_gguf"
K_QUANT_CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=1,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
K_QUANT_SEED = 3


@dataclass(frozen=True, slots=True)
class File:
    """One GGUF file: the directory of tiny/ that it comes from, and the type of its matrices.

    `lossless`: the type keeps every weight, and the prompts are the directory's own, so the numbers
    must be the directory's too.
    """

    name: str
    source: str
    kind: Kind
    seed: int  # of the prompts
    lossless: bool = False


FILES = (
    File("llama-f32", "llama", Kind.F32, 9, lossless=True),
    File("llama-f16", "llama", Kind.F16, 11),
    File("llama-bf16", "llama", Kind.BF16, 14),
    File("llama-q8_0", "llama", Kind.Q8_0, 13),
    File("llama-q4_0", "llama", Kind.Q4_0, 15),
    File("llama-q4_1", "llama", Kind.Q4_1, 6),
    File("llama-rope-freqs", "llama-rope-llama3", Kind.F16, 13, lossless=True),
    File("qwen2-bf16", "qwen2", Kind.BF16, 1, lossless=True),
    File("qwen3-q8_0", "qwen3", Kind.Q8_0, 16),
)


def add_metadata(writer: GGUFWriter, config: PreTrainedConfig, name: str) -> None:
    """The keys of llama.cpp's converter: the model's numbers and the vocabulary of tiny/llama."""
    writer.add_name(name)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim(config))
    if head_dim(config) * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim(config))
        writer.add_value_length(head_dim(config))
    writer.add_vocab_size(VOCAB)

    tokenizer = json.loads((TINY / "llama" / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def head_dim(config: PreTrainedConfig) -> int:
    explicit = getattr(config, "head_dim", None)
    return explicit or config.hidden_size // config.num_attention_heads


def matrices(model: torch.nn.Module, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """A model's weights under GGUF names, q and k of arch llama in llama.cpp's row order."""
    tensors = {}
    for name, weight in model.named_parameters():
        value = weight.detach().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = to_interleaved(value, heads)
        tensors[gguf_name(name)] = value
    return tensors


def rope_factors(config: PreTrainedConfig) -> np.ndarray:
    """float32[head_dim / 2]: what llama3 rope scaling divides each frequency by."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    size = head_dim(config)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
    return (plain / scaled).numpy()


def random_q4_k(generator: np.random.Generator, shape: tuple[int, int], std: float) -> np.ndarray:
    """uint8[rows, bytes]: blocks of 256 weights d * scale * q - dmin * min, about zero on average.

    Layout: d, dmin (float16), twelve bytes with eight 6-bit scales and mins, 128 bytes of nibbles.
    """
    blocks = shape[0] * shape[1] // 256
    scale = generator.integers(20, 64, (blocks, 8)).astype(np.uint8)
    low = np.clip(scale + generator.integers(-3, 4, (blocks, 8)), 0, 63).astype(np.uint8)
    halves = np.array([1.0, 7.5], np.float16) * np.float16(std / 200)
    packed = np.concatenate(
        [
            scale[:, :4] | (scale[:, 4:] >> 4) << 6,
            low[:, :4] | (low[:, 4:] >> 4) << 6,
            (scale[:, 4:] & 15) | (low[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = generator.integers(0, 256, (blocks, 128)).astype(np.uint8)
    head = np.broadcast_to(halves.view(np.uint8), (blocks, 4))
    raw = np.concatenate([head, packed, nibbles], axis=1).reshape(shape[0], -1)
    weights = dequantize(raw, Kind.Q4_K).reshape(blocks, 8, 32)
    d, d_min = halves.astype(np.float32)
    levels = (weights + d_min * low[..., None]) / (d * scale[..., None])
    assert np.allclose(levels, levels.round(), atol=1e-3)  # the six bits were packed right
    assert levels.round().min() == 0
    assert levels.round().max() == 15
    return raw


def random_q6_k(generator: np.random.Generator, shape: tuple[int, int], std: float) -> np.ndarray:
    """uint8[rows, bytes]: blocks of 256 weights d * scale * (q - 32).

    Layout: 128 bytes of low nibbles, 64 of high pairs, sixteen int8 scales, d (float16).
    """
    blocks = shape[0] * shape[1] // 256
    bits = generator.integers(0, 256, (blocks, 192)).astype(np.uint8)
    scale = generator.integers(40, 120, (blocks, 16)) * generator.choice([-1, 1], (blocks, 16))
    half = np.array([std / (18.5 * 80)], np.float16)
    tail = np.broadcast_to(half.view(np.uint8), (blocks, 2))
    raw = np.concatenate([bits, scale.astype(np.int8).view(np.uint8), tail], axis=1)
    return raw.reshape(shape[0], -1)


def start(name: str, config: PreTrainedConfig) -> tuple[GGUFWriter, Path]:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.gguf"
    writer = GGUFWriter(path, config.model_type)
    add_metadata(writer, config, f"tiny {name}")
    return writer, path


def finish(writer: GGUFWriter, path: Path, seed: int, source: str | None) -> list[dict[str, Any]]:
    """Writes the file and, from the file, its numbers, which it returns."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = model_from_gguf(path)
    entries = golden(model, random_prompts(seed))
    head = {
        "model": path.name,
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "dtype": "float32",
        "source": source,
        "eos_token_ids": [2],
        "steps": STEPS,
        "min_margin": min(entry["min_margin"] for entry in entries),
    }
    for entry in entries:
        tokens = entry["token_ids"]
        entry["first_eos"] = tokens.index(2) if 2 in tokens else None
    write_golden(path.with_suffix(".json"), head, entries)
    distinct = min(len(set(entry["token_ids"])) for entry in entries)
    size = path.stat().st_size / 1024
    print(f"{path.name:>22} {size:4.0f} KB, margin {head['min_margin']:.3f}, {distinct} distinct")
    return entries


def check_same(entries: list[dict[str, Any]], source: Path) -> None:
    """The numbers of a lossless file against those of the directory that it came from."""
    prompts = json.loads((source / "golden.json").read_text(encoding="utf-8"))["prompts"]
    for entry, original in zip(entries, prompts, strict=False):
        assert entry["prompt_token_ids"] == original["prompt_token_ids"]
        assert entry["top_token_ids"] == original["top_token_ids"]
        moved = np.subtract(entry["top_logprobs"], original["top_logprobs"])
        assert np.abs(moved).max() < 1e-4, entry["name"]


def make(file: File) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY / file.source, dtype=torch.float32)
    config = model.config
    writer, path = start(file.name, config)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    for name, value in matrices(model, config).items():
        kind = file.kind if value.ndim == 2 else Kind.F32
        writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    entries = finish(writer, path, file.seed, file.source)
    if file.lossless:
        check_same(entries, TINY / file.source)


def make_k_quants(seed: int) -> None:
    """Q6_K for the embedding and the v projection, Q4_K for the rest, as llama.cpp mixes them."""
    config = K_QUANT_CONFIG
    writer, path = start("llama-q4_k-q6_k", config)
    generator = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in sorted(model.named_parameters()):
        shape = tuple(weight.shape)
        std = spread(name, shape, tied=True)
        if len(shape) == 1:
            drawn = (1 + std * generator.standard_normal(shape)).astype(np.float32)
            writer.add_tensor(gguf_name(name), drawn)
            continue
        fine = any(part in name for part in ("embed_tokens", "v_proj"))
        kind = Kind.Q6_K if fine else Kind.Q4_K
        fill: Callable[..., Any] = random_q6_k if fine else random_q4_k
        writer.add_tensor(gguf_name(name), fill(generator, shape, std), raw_dtype=kind)
    finish(writer, path, seed, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in FILES:
        make(file)
    make_k_quants(K_QUANT_SEED)

"""The reference side of the golden values: GGUF files and torch models to numbers.

Owns reading a GGUF file into a transformers model in float32, its tokenizer, and the greedy run
that is written down. Knows nothing of jaxserve: the engine's own code may not make its reference.
"""
# pyright: basic, reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, kind = gguf_name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return f"{TOP_NAMES[stem]}.{kind}"


def gguf_name(name: str) -> str:
    """The inverse of `hf_name`."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        short = {value: key for key, value in LAYER_NAMES.items()}[part]
        return f"blk.{layer}.{short}.{kind}"
    return f"{ {value: key for key, value in TOP_NAMES.items()}[stem] }.{kind}"


def to_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from transformers' order (two halves) to llama.cpp's (pairs).

    Rotary pair j of a head is rows (j, j + d/2) in transformers and rows (2j, 2j + 1) in a GGUF
    file of arch llama. weight: float[heads * d, ...], the same shape comes back.
    """
    head_dim = weight.shape[0] // heads
    halves = weight.reshape(heads, 2, head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def from_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_interleaved`."""
    head_dim = weight.shape[0] // heads
    pairs = weight.reshape(heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file as plain Python values."""
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def model_from_gguf(path: Path) -> PreTrainedModel:
    """A float32 transformers model with the file's dequantized weights, eager attention.

    `rope_freqs.weight` (llama.cpp's form of llama3 rope scaling) divides the rotary frequencies.
    """
    meta = fields(path)
    arch = meta["general.architecture"]
    config_class, model_class = ARCHITECTURES[arch]

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{key}", default)

    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    tensors = {
        tensor.name: np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).copy()
        for tensor in GGUFReader(path).tensors
    }
    rope_factors = tensors.pop("rope_freqs.weight", None)
    config = config_class(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=get("attention.key_length", get("embedding_length") // heads),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    if arch == "llama":
        for name in tensors:
            if name.endswith((".attn_q.weight", ".attn_k.weight")):
                count = heads if ".attn_q." in name else kv_heads
                tensors[name] = from_interleaved(tensors[name], count)
    model = model_class(config).float().eval()
    state = {hf_name(name): torch.from_numpy(value) for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else []), missing
    model.tie_weights()
    if rope_factors is not None:
        model.model.rotary_emb.inv_freq /= torch.from_numpy(rope_factors)
    return model


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """The file's byte-level BPE; pre-tokenizer `smollm`: single digits, then GPT-2's pattern."""
    meta = fields(path)
    assert meta["tokenizer.ggml.model"] == "gpt2"
    assert meta["tokenizer.ggml.pre"] == "smollm"
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    bpe = models.BPE({token: index for index, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = digits_then_bytes()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of SmolLM2, used for the tiny vocabulary too."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@torch.no_grad()
def record(model: PreTrainedModel, prompt: list[int], steps: int) -> dict[str, Any]:
    """The greedy continuation of `prompt`, token by token with a KV cache, never stopping at EOS.

    Returns the part of a golden entry that the model decides; the README gives its layout.
    """
    result = model(torch.tensor([prompt]), use_cache=True)
    logprobs = torch.log_softmax(result.logits[0].float(), -1)  # float32[prompt, vocab]
    follows = logprobs[:-1].gather(-1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]
    entry: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "prompt_logprobs": [None, *rounded(follows)],
        "token_ids": [],
        "logprobs": [],
        "top_token_ids": [],
        "top_logprobs": [],
        "margins": [],
    }
    last = logprobs[-1]
    for _ in range(steps):
        values, ids = last.topk(5)
        entry["token_ids"].append(int(ids[0]))
        entry["logprobs"].append(rounded(values)[0])
        entry["top_token_ids"].append(ids.tolist())
        entry["top_logprobs"].append(rounded(values))
        entry["margins"].append(round(float(values[0] - values[1]), 6))
        result = model(ids[None, :1], cache=result.cache, use_cache=True)
        last = torch.log_softmax(result.logits[0, -1].float(), -1)
    entry["min_margin"] = min(entry["margins"])
    return entry


@torch.no_grad()
def largest_difference(model: PreTrainedModel, entry: dict[str, Any]) -> float:
    """The entry's logprobs against one full forward without a cache, in nats."""
    prompt, tokens = entry["prompt_token_ids"], entry["token_ids"]
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    again = logprobs.gather(-1, torch.tensor(entry["top_token_ids"]))
    return float((again - torch.tensor(entry["top_logprobs"])).abs().max())


def rounded(values: torch.Tensor) -> list[float]:
    """Six decimals: finer than float32 agrees between two implementations."""
    return [round(value, 6) for value in values.tolist()]


def write_golden(path: Path, head: dict[str, Any], prompts: list[dict[str, Any]]) -> None:
    """One JSON object; a line per head key and per prompt, so that diffs stay readable."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    compact = [json.dumps(prompt, separators=(",", ":")) for prompt in prompts]
    lines.append('"prompts": [\n' + ",\n".join(compact) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

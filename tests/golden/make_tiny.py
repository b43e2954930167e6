"""Writes tiny/: a random model of each supported family as a Hugging Face directory with numbers.

    /tmp/golden/bin/python tests/golden/make_tiny.py      (the environment of make_golden.py)

Weights come from numpy's generator with a seed per model, scaled so that attention looks around,
greedy output wanders, and no step is a near-tie. Every golden.json comes from the directory as
transformers reads it back. make_tiny_gguf.py goes on from here.
"""
# pyright: basic, reportMissingImports=false

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch_reference import digits_then_bytes, largest_difference, record, write_golden
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

TINY = Path(__file__).parent / "tiny"
VOCAB = 320
STEPS = 16
LENGTHS = (1, 5, 16, 17, 40, 100)
SMALLEST_MARGIN = 1e-2
SMALLEST_EFFECT = 5e-2  # what every control must move some logprob by, in nats
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then the dog thinks about the fox.",
    "A batch is a set of rows; a row is a sequence; a sequence is a list of tokens in pages.",
    "When the pages run out, the youngest of the rows is the one that has to wait and start again.",
    "There is nothing in the other room but the sound of the rain on the stone of the house.",
    "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n",
]
TEXTS = ["Hello there, the rain is on the house.", "In 2024: 3 cafés, 12 résumés 🎉", "日本 dog"]
CHAT = [{"role": "user", "content": "Is the fox in the house?"}]


@dataclass(frozen=True, slots=True)
class Tiny:
    """One directory; `legacy` writes its configuration in the form of transformers 4."""

    name: str
    config: type[PreTrainedConfig]
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    legacy: bool = False
    shard: str | None = None
    eos_list: bool = False
    tokenizer: bool = False


WIDE = {"hidden_size": 64, "intermediate_size": 96}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 2}
TINIES = (
    Tiny("llama", LlamaConfig, 9, dtype="float32", tokenizer=True),
    Tiny(
        "llama-tied",
        LlamaConfig,
        36,
        {**WIDE, "tie_word_embeddings": True, "num_hidden_layers": 3},
        {"rope_theta": 100000.0},
        legacy=True,
        eos_list=True,
    ),
    Tiny("llama-bias", LlamaConfig, 10, {**WIDE, "attention_bias": True, "mlp_bias": True}),
    Tiny("llama-rope-llama3", LlamaConfig, 13, WIDE, LLAMA3_ROPE),
    Tiny("llama-rope-linear", LlamaConfig, 1, WIDE, LINEAR_ROPE, legacy=True),
    Tiny(
        "mistral",
        MistralConfig,
        3,
        {"head_dim": 16, "sliding_window": None},
        {"rope_theta": 1000000.0},
        dtype="float32",
        shard="80KB",
    ),
    Tiny("qwen2", Qwen2Config, 1, {**WIDE, **NO_WINDOW, "tie_word_embeddings": True}, legacy=True),
    Tiny(
        "qwen3",
        Qwen3Config,
        7,
        {"head_dim": 16, "tie_word_embeddings": True},
        {"rope_theta": 1000000.0},
        eos_list=True,
    ),
    Tiny("qwen3-untied", Qwen3Config, 15, {"head_dim": 32, "num_key_value_heads": 1}),
)


def configuration(tiny: Tiny) -> PreTrainedConfig:
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2 if tiny.tokenizer else None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **tiny.rope},
    }
    return tiny.config(**(options | tiny.options))


def spread(name: str, shape: tuple[int, ...], tied: bool) -> float:
    """The standard deviation of a weight: attention scores near 1.5, logits near 3."""
    if name.endswith(".bias"):
        return 0.5
    if "norm" in name:
        return 0.3
    if "q_proj" in name or "k_proj" in name:
        return (1.5 / shape[1]) ** 0.5
    if "lm_head" in name or (tied and "embed_tokens" in name):
        return 3.0 * shape[1] ** -0.5
    if "embed_tokens" in name:
        return 1.0
    return 1.5 * shape[1] ** -0.5


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Weights in the order of their names; norms around one, everything else around zero."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            shape = tuple(weight.shape)
            drawn = generator.standard_normal(shape) * spread(
                name, shape, config.tie_word_embeddings
            )
            weight.copy_(torch.from_numpy(drawn + ("norm" in name)))
    return model


def random_prompts(seed: int) -> list[dict[str, Any]]:
    """Ids above the special tokens, of lengths around the page size of 16 and past it."""
    generator = np.random.default_rng(1000 + seed)
    return [
        {
            "name": f"random_{length}",
            "prompt_token_ids": generator.integers(len(SPECIAL), VOCAB, length).tolist(),
        }
        for length in LENGTHS
    ]


def text_prompts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    rendered = jinja2.Template(CHAT_TEMPLATE).render(messages=CHAT, add_generation_prompt=True)
    entries: list[dict[str, Any]] = [
        {"name": f"text_{index}", "text": text} for index, text in enumerate(TEXTS)
    ]
    entries.append({"name": "chat", "messages": CHAT, "text": rendered})
    return [entry | {"prompt_token_ids": tokenizer.encode(entry["text"]).ids} for entry in entries]


def golden(model: PreTrainedModel, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every prompt with the model's numbers, checked against full forwards and for near-ties."""
    entries = [prompt | record(model, prompt["prompt_token_ids"], STEPS) for prompt in prompts]
    for entry in entries:
        assert largest_difference(model, entry) < 1e-4, entry["name"]
        assert entry["min_margin"] > SMALLEST_MARGIN, (entry["name"], entry["min_margin"])
    return entries


def controls(model: PreTrainedModel, entry: dict[str, Any]) -> dict[str, float]:
    """How far leaving out a feature moves a logprob of `entry`: what a loose test would miss."""

    def effect(change: Callable[[PreTrainedModel], None]) -> float:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            change(changed)
        moved = largest_difference(changed, entry)
        assert moved > SMALLEST_EFFECT, (change, moved)
        return round(moved, 3)

    def fill(part: str, value: float) -> Callable[[PreTrainedModel], None]:
        def change(changed: PreTrainedModel) -> None:
            for name, weight in changed.named_parameters():
                if part in name:
                    weight.fill_(value)

        return change

    def plain_rope(changed: PreTrainedModel) -> None:
        rotary = changed.model.rotary_emb
        theta = changed.config.rope_parameters["rope_theta"]
        size = 2 * len(rotary.inv_freq)
        rotary.inv_freq = theta ** -(torch.arange(0, size, 2).float() / size)

    names = [name for name, _ in model.named_parameters()]
    found = {"norms_are_one": effect(fill("norm", 1.0))}
    if any("q_norm" in name for name in names):
        found["head_norms_are_one"] = effect(fill("self_attn.q_norm", 1.0))
    if any(name.endswith("proj.bias") for name in names):
        found["no_bias"] = effect(fill("proj.bias", 0.0))
    if model.config.rope_parameters["rope_type"] != "default":
        found["rope_unscaled"] = effect(plain_rope)
    found["no_rope"] = effect(lambda changed: changed.model.rotary_emb.inv_freq.zero_())
    return found


def as_of_transformers_4(path: Path) -> None:
    """Rewrites config.json with the keys that nearly all published checkpoints have."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["transformers_version"] = "4.40.0"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE of VOCAB entries: three special tokens, 256 bytes, merges of CORPUS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = digits_then_bytes()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def save_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = trained_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    loaded = AutoTokenizer.from_pretrained(folder)
    for prompt in text_prompts(tokenizer):
        assert loaded(prompt["text"])["input_ids"] == prompt["prompt_token_ids"]
    again = loaded.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert again == text_prompts(tokenizer)[-1]["text"]
    return tokenizer


def make(tiny: Tiny) -> None:
    folder = TINY / tiny.name
    shutil.rmtree(folder, ignore_errors=True)
    written = random_model(configuration(tiny), tiny.seed).to(getattr(torch, tiny.dtype))
    written.save_pretrained(folder, max_shard_size=tiny.shard or "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if tiny.legacy:
        as_of_transformers_4(folder / "config.json")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = random_prompts(tiny.seed)
    eos: list[int] = [2] if tiny.tokenizer else []
    if tiny.tokenizer:
        prompts += text_prompts(save_tokenizer(folder))
    model_rope = random_model(configuration(tiny), tiny.seed).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, model_rope)  # the legacy keys were read
    entries = golden(model, prompts)
    if tiny.eos_list:
        eos = [entries[2]["token_ids"][6], entries[4]["token_ids"][9]]
        GenerationConfig(eos_token_id=eos).save_pretrained(folder)
    for entry in entries:
        tokens = entry["token_ids"]
        entry["first_eos"] = next((at for at, token in enumerate(tokens) if token in eos), None)
        if tiny.tokenizer:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            entry["output_text"] = tokenizer.decode(tokens, skip_special_tokens=False)
    head = {
        "model": tiny.name,
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "dtype": "float32",
        "stored_dtype": tiny.dtype,
        "eos_token_ids": eos,
        "steps": STEPS,
        "min_margin": min(entry["min_margin"] for entry in entries),
        "controls": controls(model, entries[4]),
    }
    write_golden(folder / "golden.json", head, entries)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1024
    distinct = min(len(set(entry["token_ids"])) for entry in entries)
    print(f"{tiny.name:>18} {size:4.0f} KB, margin {head['min_margin']:.3f}, {distinct} distinct")
    print(" " * 18, head["controls"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for tiny in TINIES:
        make(tiny)

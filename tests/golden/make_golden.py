"""Writes smollm2.json: SmolLM2-135M-Instruct from its GGUF file, run by torch in float32.

    python -m venv /tmp/golden
    /tmp/golden/bin/pip install gguf jinja2 safetensors transformers
    /tmp/golden/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    /tmp/golden/bin/python tests/golden/make_golden.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

Python 3.11 or later; torch is needed here only, never by the project. The tiny models have their
own script, make_tiny.py.
"""
# pyright: basic, reportMissingImports=false

import sys
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers
from smollm2_prompts import CHATS, PROSE_600, TEXTS
from torch_reference import (
    fields,
    largest_difference,
    model_from_gguf,
    record,
    tokenizer_from_gguf,
    write_golden,
)

STEPS = 32
SMALLEST_MARGIN = 5e-3  # below this a test could not tell a tie from a fault


def prompts_of(path: Path) -> list[dict[str, Any]]:
    """Name, text and token ids of every prompt; chats also with their messages."""
    tokenizer = tokenizer_from_gguf(path)
    template = jinja2.Template(fields(path)["tokenizer.chat_template"])
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "messages": messages,
            "text": template.render(messages=messages, add_generation_prompt=True),
        }
        for name, messages in CHATS.items()
    ]
    entries += [{"name": name, "text": text} for name, text in TEXTS.items()]
    cut = tokenizer.encode(PROSE_600).ids[:600]
    entries.append({"name": "tokens_600", "text": tokenizer.decode(cut)})
    for entry in entries:
        entry["prompt_token_ids"] = tokenizer.encode(entry["text"]).ids
    assert len(entries[-1]["prompt_token_ids"]) == 600
    return entries


def main(path: Path) -> None:
    torch.set_num_threads(1)
    model = model_from_gguf(path)
    tokenizer = tokenizer_from_gguf(path)
    eos = fields(path)["tokenizer.ggml.eos_token_id"]
    prompts = []
    for entry in prompts_of(path):
        entry |= record(model, entry["prompt_token_ids"], STEPS)
        tokens = entry["token_ids"]
        entry["output_text"] = tokenizer.decode(tokens, skip_special_tokens=False)
        entry["first_eos"] = tokens.index(eos) if eos in tokens else None
        difference = largest_difference(model, entry)
        print(
            f"{entry['name']:>14} {len(entry['prompt_token_ids']):4d} tokens, "
            f"margin {entry['min_margin']:.4f}, full forward differs by "
            f"{difference:.1e}: {entry['output_text']!r}",
            flush=True,
        )
        assert difference < 1e-4, entry["name"]
        prompts.append(entry)
    near_ties = [entry["name"] for entry in prompts if entry["min_margin"] < SMALLEST_MARGIN]
    assert not near_ties, near_ties
    head = {
        "model": path.name,
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "dtype": "float32",
        "eos_token_ids": [eos],
        "steps": STEPS,
        "min_margin": min(entry["min_margin"] for entry in prompts),
    }
    write_golden(Path(__file__).parent / "smollm2.json", head, prompts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

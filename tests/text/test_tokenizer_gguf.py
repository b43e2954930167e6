import subprocess
import sys

import pytest

from jaxserve.text.tokenizer import Tokenizer, TokenizerLoadError


def test_smollm2_ids_are_those_of_llama_cpp(smollm2, golden):
    expected = golden["smollm2"]
    assert [smollm2.encode(text) for text in expected["texts"]] == expected["ids"]
    assert smollm2.encode("12345") == [33, 34, 35, 36, 37]  # digits one by one
    assert smollm2.encode("a1b22") == [81, 33, 82, 34, 34]


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2, 0)  # <|im_end|> as the file says, <|endoftext|> by its name
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.has_chat_template
    assert not smollm2.strips_leading_space


@pytest.mark.parametrize("pre", ["default", "smollm", "gpt-2", "llama-bpe", "dbrx", "qwen2"])
def test_pre_tokenizers_cut_as_llama_cpp_does(golden, pre):
    case = golden["pre_tokenizers"]
    tokenizer = Tokenizer.from_gguf(case["metadata"] | {"tokenizer.ggml.pre": pre})
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in case["texts"]]
    assert ids == case["ids"][pre]


def test_the_golden_vocabulary_tells_the_pre_tokenizers_apart(golden):
    ids = golden["pre_tokenizers"]["ids"]
    assert len({str(ids[pre]) for pre in ids if pre != "dbrx"}) == len(ids) - 1


def test_tekken_cuts_ascii_as_llama_cpp_does(golden):
    # Elsewhere llama.cpp only approximates the classes of the model's own pattern.
    case = golden["pre_tokenizers"]
    tokenizer = Tokenizer.from_gguf(case["metadata"] | {"tokenizer.ggml.pre": "tekken"})
    for text, ids in zip(case["texts"], case["ids"]["tekken"], strict=True):
        if text.isascii():
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_bos_follows_the_pre_tokenizer_unless_the_file_says(golden, pre, adds):
    metadata = golden["pre_tokenizers"]["metadata"] | {"tokenizer.ggml.pre": pre}
    assert (Tokenizer.from_gguf(metadata).encode("a")[0] == 1) is adds
    metadata["tokenizer.ggml.add_bos_token"] = not adds
    assert (Tokenizer.from_gguf(metadata).encode("a")[0] == 1) is not adds


def test_sentencepiece_ids(sentencepiece, golden):
    case = golden["sentencepiece"]
    ids = [sentencepiece.encode(text, add_special_tokens=False) for text in case["texts"]]
    assert ids == case["ids"]


def test_sentencepiece_decodes_what_it_encoded(sentencepiece, golden):
    for text in golden["sentencepiece"]["texts"][:-5]:
        assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_sentencepiece_without_space_prefix(golden):
    metadata = golden["sentencepiece"]["metadata"] | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(" a b")
    assert tokenizer.decode(ids) == " a b"
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_bos_exactly_once(sentencepiece):
    plain = sentencepiece.encode("Hello", add_special_tokens=False)
    assert sentencepiece.encode("Hello") == [1, *plain]
    assert sentencepiece.encode("<s>Hello").count(1) == 1
    assert sentencepiece.encode("") == [1]
    assert sentencepiece.encode("", add_special_tokens=False) == []


def test_special_tokens_as_plain_text(smollm2, sentencepiece):
    ids = smollm2.encode("a<|im_end|>b", parse_special=False)
    assert ids == [81, *smollm2.encode("<|im_end|"), 46, 82]
    assert not smollm2.special_ids.intersection(ids)
    assert smollm2.decode(ids) == "a<|im_end|>b"
    assert smollm2.encode("a<|im_end|>b") == [81, 2, 82]
    literal = sentencepiece.encode("</s><tool>", parse_special=False, add_special_tokens=False)
    assert not sentencepiece.special_ids.intersection(literal)
    assert sentencepiece.decode(literal) == "</s><tool>"


def test_token_bytes_join_to_the_text(smollm2, sentencepiece, golden):
    text = "naïve 日本語 👨‍👩‍👧 \n"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()
    assert "\ufffd" in "".join(map(smollm2.token_text, ids))
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == b" " + text.encode()
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    newline = golden["sentencepiece"]["metadata"]["tokenizer.ggml.tokens"].index("<0x0A>")
    assert sentencepiece.token_bytes(newline) == b"\n"


def test_ids_that_stand_for_nothing(smollm2, golden):
    assert smollm2.token_bytes(49152) == smollm2.token_bytes(-1) == b""
    assert smollm2.decode([33, 10**9, -5]) == "1"
    metadata = golden["pre_tokenizers"]["metadata"]
    unused = [*metadata["tokenizer.ggml.token_type"][:-1], 5]
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": unused})
    assert tokenizer.token_bytes(len(unused) - 1) == b""


def test_decode_skips_special_tokens_or_not(smollm2):
    assert smollm2.decode([1, 28120, 2]) == "hello"
    assert smollm2.decode([1, 28120, 2], skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_names_of_end_tokens_make_them_special(golden):
    metadata = golden["pre_tokenizers"]["metadata"]
    last = len(metadata["tokenizer.ggml.tokens"])
    more = {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "<|im_end|>"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
    }
    tokenizer = Tokenizer.from_gguf(metadata | more)
    assert tokenizer.eos_ids == (0, last)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [last]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a zzzz"]}, "tokenizer.ggml.merges: "),
        ({"tokenizer.ggml.merges": ["a"]}, "tokenizer.ggml.merges: "),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "no tokenizer.ggml.bos_token_id",
        ),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]},
            "tokenizer.ggml.scores has 1 entries",
        ),
    ],
)
def test_bad_metadata_is_named(golden, change, message):
    with pytest.raises(TokenizerLoadError, match=message):
        Tokenizer.from_gguf(golden["pre_tokenizers"]["metadata"] | change)


def test_the_same_token_twice_is_refused(golden):
    metadata = golden["pre_tokenizers"]["metadata"]
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "a"]
    with pytest.raises(TokenizerLoadError, match="'a' twice"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": tokens})


def test_import_is_light():
    code = (
        "import sys, jaxserve.text.tokenizer, jaxserve.text.detokenizer;"
        "print([m for m in ('transformers', 'jinja2', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

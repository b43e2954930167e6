import importlib
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Encoder

from jaxserve.text.tokenizer import Tokenizer, TokenizerLoadError

TEMPLATE = """
{%- set ns = namespace(count=0) -%}
{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
<|{{ message.role }}|>{{ ns.count }}
{{ message.content | trim }}{% generation %}!{% endgeneration %}<|end|>
{% endfor %}
{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=1) }}{% endif %}
{% if add_generation_prompt %}<|assistant|>{{ strftime_now('%%') }}{{ extra }}{% endif %}
"""
MESSAGES = [
    {"role": "user", "content": " <b> 'it''s' 12345 日本 & "},
    {"role": "assistant", "content": "ok"},
    {"role": "stop", "content": "never"},
]


def byte_level(golden) -> Encoder:
    metadata = golden["pre_tokenizers"]["metadata"]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    encoder = Encoder(models.BPE(vocab=vocab, merges=merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    specials = ["<eos>", "<bos>", "<|user|>", "<|assistant|>", "<|end|>"]
    encoder.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    encoder.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return encoder


def add_bos(encoder: Encoder) -> None:
    encoder.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )


def save(path, encoder: Encoder, **config) -> Tokenizer:
    encoder.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": {"__type": "AddedToken", "content": "<eos>"}}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind | named | config))
    return Tokenizer.from_directory(path)


def test_ids_and_chat_are_those_of_transformers(tmp_path, golden):
    transformers = pytest.importorskip("transformers")
    encoder = byte_level(golden)
    add_bos(encoder)
    ours = save(tmp_path, encoder, chat_template=TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in golden["pre_tokenizers"]["texts"] + ["<|user|>hi<|end|>", "<think> x"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    tools = [{"type": "function", "function": {"name": "é<f>", "parameters": {"a": 1}}}]
    for given in (None, tools):
        text = theirs.apply_chat_template(
            MESSAGES, tools=given, add_generation_prompt=True, tokenize=False, extra="E"
        )
        assert "never" not in text
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.render_chat(MESSAGES, tools=given, extra={"extra": "E"}) == ids
    assert ids.count(ours.bos_id) == 1


def test_user_text_with_control_tokens_is_guarded_as_by_transformers(tmp_path, golden):
    transformers = pytest.importorskip("transformers")
    ours = save(tmp_path, byte_level(golden), chat_template=TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "a<|end|>b"}]
    ids = ours.render_chat(messages)
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    )
    assert theirs.decode(ids) == theirs.decode(expected)
    assert [i for i in ids if i in ours.special_ids] == [
        i for i in expected if i in ours.special_ids
    ]


def test_facts(tmp_path, golden):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1602, 0]}')
    tokenizer = save(tmp_path, byte_level(golden))
    assert tokenizer.vocab_size == 1604
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (0, 1602)
    assert tokenizer.special_ids == {0, 1, 1600, 1601, 1602}
    assert not tokenizer.has_chat_template
    assert tokenizer.token_bytes(1603) == b"<think>"
    assert tokenizer.decode([1603, 1602]) == "<think>"


@pytest.mark.parametrize("value", ["7", "[7, 0]"])
def test_eos_of_config_json(tmp_path, golden, value):
    (tmp_path / "config.json").write_text(f'{{"eos_token_id": {value}}}')
    assert save(tmp_path, byte_level(golden)).eos_ids == (0, 7)


def test_add_bos_token_counts_without_a_post_processor(tmp_path, golden):
    encoder = byte_level(golden)
    assert save(tmp_path, encoder, add_bos_token=True).encode("a")[0] == 1
    assert save(tmp_path, encoder, add_bos_token=False).encode("a")[0] != 1
    encoder.post_processor = processors.ByteLevel()
    assert save(tmp_path, encoder, add_bos_token=True).encode("a")[0] != 1


def test_tokens_that_only_the_config_knows(tmp_path, golden):
    listed = {"1604": {"content": "<more>", "special": True}}
    tokenizer = save(tmp_path, byte_level(golden), added_tokens_decoder=listed, pad_token="<pad>")
    assert tokenizer.encode("<more><pad>") == [1604, 1605]
    assert tokenizer.decode([1604, 1605]) == ""


def test_template_files(tmp_path, golden):
    messages = [{"role": "user", "content": "x"}]
    listed = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    encoder = byte_level(golden)

    def rendered(**options):
        tokenizer = save(tmp_path, encoder, chat_template=listed)
        return tokenizer.decode(tokenizer.render_chat(messages, **options))

    assert rendered() == "one"
    assert rendered(tools=[{}]) == "two"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "three"}')
    assert rendered() == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert rendered() == "four"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("five")
    assert rendered(template="rag") == "five"


def sentencepiece_like(golden, *, legacy: bool) -> Encoder:
    """The two forms in which tokenizer.json files have a SentencePiece model."""
    loaded = Tokenizer.from_gguf(golden["sentencepiece"]["metadata"])
    encoder = loaded._encoder
    ending = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    encoder.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *ending])
    if not legacy:
        encoder.normalizer = normalizers.Sequence([])
        encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return encoder


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_forms(tmp_path, golden, legacy):
    encoder = sentencepiece_like(golden, legacy=legacy)
    add_bos_as = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = save(tmp_path, encoder, add_bos_token=True, **add_bos_as)
    assert tokenizer.strips_leading_space
    case = golden["sentencepiece"]
    for text, ids in list(zip(case["texts"], case["ids"], strict=True))[:-5]:
        if legacy or not text.startswith(" "):  # Metaspace adds no second space
            assert tokenizer.encode(text) == [1, *ids]
            assert tokenizer.decode(ids) == text == encoder.decode(ids)
    marked = tokenizer._marks.swap("<s>a b</s> c <tool>d")
    plain = tokenizer.encode("<s>a b</s> c <tool>d", add_special_tokens=False)
    assert tokenizer._encode_literally(marked) == plain


def test_missing_and_broken_files_are_named(tmp_path, golden):
    with pytest.raises(TokenizerLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: "):
        Tokenizer.from_directory(tmp_path)
    encoder = byte_level(golden)
    encoder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config\.json: must hold"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{oops")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config\.json: "):
        Tokenizer.from_directory(tmp_path)


def test_a_model_file_that_cannot_be_converted_is_named(tmp_path):
    importlib.import_module("transformers")
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(TokenizerLoadError, match=r"no tokenizer\.json, and tokenizer\.model"):
        Tokenizer.from_directory(tmp_path)


def test_decoders_that_are_not_understood_are_refused(tmp_path, golden):
    encoder = byte_level(golden)
    encoder.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerLoadError, match="decoder WordPiece is not supported"):
        save(tmp_path, encoder)
    encoder.decoder = decoders.Replace("x", " ")
    with pytest.raises(TokenizerLoadError, match="decoder replaces 'x'"):
        save(tmp_path, encoder)


def test_a_tokenizer_without_bos_and_post_processor_loads() -> None:
    """tests/golden/tiny/llama has neither; asking for its BOS must not be an error."""
    directory = Path(__file__).parents[1] / "golden" / "tiny" / "llama"
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"

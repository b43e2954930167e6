"""A `Vocabulary` out of a GGUF file's metadata. Knows the tokenizer.ggml.* keys; reads no file.

The pre-tokenizers are those that llama.cpp means by `tokenizer.ggml.pre`, written as the models'
own tokenizer.json files have them. A name that is not in the registry is refused: a wrong split
gives wrong ids without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from jaxserve.text.vocabulary import (
    SPACE,
    MissingTokenizer,
    TokenizerLoadError,
    Vocabulary,
    byte_level_bytes,
    sentencepiece_bytes,
)


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a turn or a text by their name, as in llama.cpp: many files give only one of them
# as tokenizer.ggml.eos_token_id, and some call them normal tokens.
_END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|return|>", "<EOT>", "</s>", "<eos>", "<end_of_utterance>"),
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before the merges: each pattern cuts the pieces that the one before left.

    ignore_merges: a piece that is itself a token is taken whole. add_bos: unless the file says.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}",), True, True)
_DBRX = PreTokenizer(_LLAMA3.patterns)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}",))
_TEKKEN = PreTokenizer(
    (
        rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    True,
    True,
)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}


class _Metadata:
    """Typed access to the keys below `tokenizer.`; what is missing or wrong is named."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self.tokens: list[str] = self.array("ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type")
        self.types = [TokenType.NORMAL] * len(self.tokens) if types is None else list(types)
        if len(self.types) != len(self.tokens):
            raise TokenizerLoadError(
                f"tokenizer.ggml.token_type has {len(self.types)} entries, "
                f"tokenizer.ggml.tokens has {len(self.tokens)}"
            )
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise TokenizerLoadError(f"tokenizer.ggml.tokens has {twice!r} twice")

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.{key}", default)

    def array(self, key: str) -> list[Any]:
        value = self.get(key)
        if value is None:
            raise TokenizerLoadError(f"the GGUF metadata has no tokenizer.{key}")
        return list(value)

    def token_id(self, name: str) -> int | None:
        """The id in tokenizer.ggml.<name>_token_id, None when there is none."""
        value = self.get(f"ggml.{name}_token_id")
        if value is not None and not 0 <= value < len(self.tokens):
            raise TokenizerLoadError(
                f"tokenizer.ggml.{name}_token_id is {value}, "
                f"but there are {len(self.tokens)} tokens"
            )
        return value

    def of_type(self, *types: TokenType) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]

    def templates(self) -> dict[str, str]:
        templates = {
            name: self.get(f"chat_template.{name}") for name in self.get("chat_templates", [])
        }
        templates["default"] = self.get("chat_template")
        return {name: source for name, source in templates.items() if source}


def _byte_level_bpe(keys: _Metadata) -> tuple[Tokenizer, bool]:
    name = keys.get("ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerLoadError(f"tokenizer.ggml.pre {name!r} is not supported; known: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in keys.array("ggml.merges")]
    try:
        bpe = models.BPE(vocab=keys.ids, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises a bare Exception
        raise TokenizerLoadError(f"tokenizer.ggml.merges: {error}") from error
    encoder = Tokenizer(bpe)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    return encoder, pre.add_bos


def _sentencepiece_bpe(keys: _Metadata) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE joins the pair whose union has the best score. The same as ranked merges:
    every way to make a token of two tokens, ordered by the token's score (and, as its own
    converters do, the longer left part first among equals)."""
    scores = keys.array("ggml.scores")
    if len(scores) != len(keys.tokens):
        raise TokenizerLoadError(
            f"tokenizer.ggml.scores has {len(scores)} entries, "
            f"tokenizer.ggml.tokens has {len(keys.tokens)}"
        )
    ranked: list[tuple[float, int, str, str]] = []
    for i in keys.of_type(TokenType.NORMAL):
        token = keys.tokens[i]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in keys.ids and right in keys.ids:
                ranked.append((-scores[i], -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    unknown = keys.token_id("unknown")
    bpe = models.BPE(
        vocab=keys.ids,
        merges=[(left, right) for _, _, left, right in ranked],
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else keys.tokens[unknown],
    )
    encoder = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    if keys.get("ggml.add_space_prefix", True):
        encoder.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    else:
        encoder.normalizer = spaces
    return encoder, True


@dataclass(frozen=True, slots=True)
class _Model:
    build: Callable[[_Metadata], tuple[Tokenizer, bool]]  # the encoder, and whether it adds BOS
    to_bytes: Callable[[str], bytes]
    add_space_prefix: bool


_MODELS: Mapping[str, _Model] = {
    "gpt2": _Model(_byte_level_bpe, byte_level_bytes, False),
    "llama": _Model(_sentencepiece_bpe, sentencepiece_bytes, True),
}


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The tokenizer of a GGUF file. TokenizerLoadError names what is missing or unknown.

    Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), section on the tokenizer.
    """
    name = metadata.get("tokenizer.ggml.model")
    if name is None:
        raise MissingTokenizer("the GGUF file has no tokenizer.ggml.model")
    model = _MODELS.get(name) if isinstance(name, str) else None
    if model is None:
        raise TokenizerLoadError(
            f"tokenizer.ggml.model {name!r} is not supported; known: {', '.join(sorted(_MODELS))}"
        )
    keys = _Metadata(metadata)
    encoder, adds_bos = model.build(keys)
    special = keys.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    ends = [keys.ids[text] for text in _END_TEXTS if text in keys.ids]
    special = frozenset({*special, *ends})
    added = sorted({*special, *keys.of_type(TokenType.USER_DEFINED)})
    encoder.add_tokens(
        [AddedToken(keys.tokens[i], special=i in special, normalized=False) for i in added]
    )

    named = {part: keys.token_id(part) for part in ("bos", "eos", "unknown", "padding")}
    bos, eos = named["bos"], named["eos"]
    ends = [eos, keys.token_id("eot"), keys.token_id("eom"), *ends]
    adds_bos = keys.get("ggml.add_bos_token", adds_bos)
    adds_eos = keys.get("ggml.add_eos_token", False)
    for adds, end, name in ((adds_bos, bos, "bos"), (adds_eos, eos, "eos")):
        if adds and end is None:
            raise TokenizerLoadError(f"the GGUF metadata has no tokenizer.ggml.{name}_token_id")
    variables = dict(bos="bos_token", eos="eos_token", unknown="unk_token", padding="pad_token")
    return Vocabulary(
        encoder=encoder,
        to_bytes=model.to_bytes,
        added={i: keys.tokens[i] for i in added},
        special_ids=special,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if adds_eos and eos is not None else (),
        silent_ids=frozenset(keys.of_type(TokenType.UNUSED)),
        strips_leading_space=keys.get("ggml.add_space_prefix", model.add_space_prefix),
        templates=keys.templates(),
        variables={variables[part]: keys.tokens[i] for part, i in named.items() if i is not None},
    )

"""What a loader hands to `Tokenizer`; how one token becomes bytes. Must not know any file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import tokenizers

from jaxserve.weights.errors import ModelError


class TokenizerLoadError(ModelError):
    """The files of a tokenizer are missing, broken or of an unsupported kind; says which."""


class MissingTokenizer(TokenizerLoadError):
    """There is no tokenizer at all: the model can only be spoken to in token ids."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded tokenizer: the encoder and the facts that decoding and chat need.

    encoder: text to ids; its own post-processor is not used, `prefix_ids` and `suffix_ids` are.
    to_bytes: the exact bytes of an ordinary token, from its text in the vocabulary.
    added: the tokens that are matched in the text before everything else, {id: text}; their bytes
        are their text. `special_ids` are those that are control tokens.
    silent_ids: ids that stand for nothing and decode to nothing.
    strips_leading_space: a space before the first word is an artefact of the encoder.
    templates: chat template sources by name ("default", "tool_use", ...).
    variables: the special tokens as templates see them ({"bos_token": "<s>"}).
    """

    encoder: tokenizers.Tokenizer
    to_bytes: Callable[[str], bytes]
    added: Mapping[int, str]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    silent_ids: frozenset[int] = frozenset()
    strips_leading_space: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map between bytes and printable characters: printable Latin-1 stands for itself, the
    other bytes, in order, for U+0100 and up (Radford et al. 2019, the reference encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # SentencePiece writes a space so


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level BPE token; with characters outside the alphabet it is text."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: `<0x0A>` is one byte, U+2581 a space."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE, " ").encode()

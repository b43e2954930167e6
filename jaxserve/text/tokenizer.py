"""`Tokenizer`: text and chats to ids, ids to exact bytes and text. Must not know jax or HTTP.

One class for every model. What differs (byte-level or SentencePiece, BOS, special tokens,
templates) is data in `Vocabulary`; the loaders are hf_vocabulary.py and gguf_vocabulary.py. Safe to
share between threads.

Special tokens in text: `encode` reads them as the control tokens that they name, as Hugging Face
does, unless parse_special=False. In a chat, `<|im_end|>` typed into a message stays ordinary text;
only the template writes control tokens. Tokens that a vocabulary adds without calling them special
(`<think>`) are read everywhere: models write them themselves and histories contain them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from jaxserve.text.chat import ChatTemplateError, ChatTemplates, ControlMarks, normalise_messages
from jaxserve.text.gguf_vocabulary import vocabulary_from_gguf
from jaxserve.text.hf_vocabulary import vocabulary_from_directory
from jaxserve.text.vocabulary import TokenizerLoadError, Vocabulary
from scheduler.errors import RequestError

__all__ = ["ChatTemplateError", "Tokenizer", "TokenizerLoadError"]


def _ids(encoder: Encoder, text: str) -> list[int]:
    try:
        return encoder.encode(text, add_special_tokens=False).ids
    except TypeError as error:
        lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        if lone is None:
            raise
        raise RequestError(
            f"the text is not valid Unicode: it has a lone surrogate, U+{ord(lone):04X}",
            code="invalid_value",
        ) from error


class Tokenizer:
    """vocab_size: ids are 0..vocab_size-1 (a model may have more rows: padding of its embedding).
    bos_id: None when there is none. eos_ids: every id that ends a text, the main one first.
    special_ids: control tokens, which decoding skips by default. strips_leading_space: decoding
    drops a space before the first word (SentencePiece). has_text: ids can be made into text.
    """

    has_text = True

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._encoder = vocabulary.encoder
        self._prefix = list(vocabulary.prefix_ids)
        self._suffix = list(vocabulary.suffix_ids)
        self._templates = ChatTemplates(vocabulary.templates, vocabulary.variables)
        self._bytes: dict[int, bytes] = {}
        self._lock = Lock()
        self.vocab_size = max([self._encoder.get_vocab_size() - 1, *vocabulary.added]) + 1
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self.strips_leading_space = vocabulary.strips_leading_space

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Of a Hugging Face model directory. TokenizerLoadError names the missing or bad file."""
        return cls(vocabulary_from_directory(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Of a GGUF file's metadata (GGUF keys to Python values); same error."""
        return cls(vocabulary_from_gguf(metadata))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    # --- text to ids

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Ids of `text`; with add_special_tokens the ids that the tokenizer puts around every text
        (BOS for most models), but never a second BOS when the text begins with one.

        parse_special=False: special tokens written in the text are ordinary text. Raises
        RequestError for half of a surrogate pair, which JSON can carry but which is no text.
        """
        if parse_special:
            ids = _ids(self._encoder, text)
        else:
            ids = self._encode_literally(self._marks.clean(text))
        return self._surround(ids) if add_special_tokens else ids

    def _surround(self, ids: list[int]) -> list[int]:
        if self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        return ids + self._suffix

    @cached_property
    def _marks(self) -> ControlMarks:
        added = self._vocabulary.added
        return ControlMarks(added[i] for i in self.special_ids if i in added)

    @cached_property
    def _literal_encoder(self) -> tuple[Encoder, dict[int, int]]:
        """A second encoder in which special tokens are ordinary text and their stand-ins (see
        ControlMarks) are tokens with the same flags; and {stand-in id: special id}. Made when first
        needed: it costs as much as loading the tokenizer."""
        literal = Encoder.from_str(self._encoder.to_str())
        literal.encode_special_tokens = True
        ids: dict[int, int] = {}
        for i, token in self._encoder.get_added_tokens_decoder().items():
            stand_in = self._marks.stand_ins.get(token.content)
            if stand_in is None:
                continue
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "normalized")}
            literal.add_tokens([AddedToken(stand_in, special=False, **flags)])
            stand_in_id = literal.token_to_id(stand_in)
            assert stand_in_id is not None
            ids[stand_in_id] = i
        return literal, ids

    def _encode_literally(self, text: str) -> list[int]:
        with self._lock:
            literal, ids = self._literal_encoder
        return [ids.get(i, i) for i in _ids(literal, text)]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        template: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat, rendered by the model's own template, with BOS exactly once where the
        tokenizer or the template adds one.

        template: the name of one of the model's templates, or a source. extra: further variables
        of the template. Raises InvalidParameter for a malformed message and ChatTemplateError when
        there is no template (code "no_chat_template") or it refuses the messages.
        """
        source = self._templates.source(template, tools)
        plain = (normalise_messages(messages), tools, extra or {})
        given = tuple(self._marks.mark(value) for value in plain)
        rendered = self._templates.render(
            source,
            **{
                **given[2],
                "messages": given[0],
                "tools": given[1],
                "documents": given[2].get("documents"),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if list(given) == list(plain):
            ids = _ids(self._encoder, rendered)
        else:
            ids = self._encode_literally(self._marks.swap(rendered))
        if self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        return ids

    # --- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; b"" for an id that stands for nothing. Never raises."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        if token_id in vocabulary.silent_ids:
            return b""
        if (text := vocabulary.added.get(token_id)) is not None:
            return text.encode()
        token = self._encoder.id_to_token(token_id)
        return b"" if token is None else vocabulary.to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """One token as text; U+FFFD where its bytes are part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` on their own: bytes that are no UTF-8 become U+FFFD. No spaces
        are "cleaned up": what the tokens say is what comes out."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

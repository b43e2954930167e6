"""What stands in for a tokenizer when a checkpoint has none: token ids in, token ids out, no
text."""

from __future__ import annotations

from typing import Any, NoReturn

import tokenizers

from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import Vocabulary
from scheduler.errors import RequestError


class IdsOnlyTokenizer(Tokenizer):
    """Every token decodes to nothing; a text is refused with RequestError (code "no_tokenizer")."""

    has_text = False

    def __init__(self) -> None:
        encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
        super().__init__(Vocabulary(encoder, lambda token: b"", {}, frozenset(), None, ()))

    def encode(self, *arguments: Any, **options: Any) -> NoReturn:
        raise _no_tokenizer("prompt")

    def render_chat(self, *arguments: Any, **options: Any) -> NoReturn:
        raise _no_tokenizer("messages")


def _no_tokenizer(param: str) -> RequestError:
    return RequestError(
        f"{param}: this model came without a tokenizer; send token ids to /v1/completions",
        param=param,
        code="no_tokenizer",
    )

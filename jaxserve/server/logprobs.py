"""Logprobs in OpenAI's two shapes: parallel lists (completions) and a list of objects (chat)."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable

from jaxserve.outputs import Logprob

# One position: the id that was chosen, and what is reported there, the chosen one among it.
Position = tuple[int, dict[int, Logprob]]

FLOOR = -9999.0  # OpenAI's sentinel for "no probability": JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def legacy_token(entry: Logprob) -> str:
    """The token's text, or "bytes:\\xe2\\x80" for part of a character, so that no two collide."""
    try:
        return entry.token_bytes.decode() if entry.token_bytes else entry.decoded_token
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)


class TextOffsets:
    """Where each token begins in a choice's text, in characters, counted over its bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def advance(self, entry: Logprob) -> int:
        """The offset of this token; the next one begins behind it."""
        start = self._length
        raw = entry.token_bytes or entry.decoded_token.encode("utf-8", "replace")
        self._length += len(self._decoder.decode(raw))
        return start


def legacy_logprobs(positions: Iterable[Position], offsets: TextOffsets) -> dict[str, object]:
    """A chosen token's number and its top_logprobs entry are the same float: clients compare."""
    tokens: list[str] = []
    values: list[float] = []
    top: list[dict[str, float]] = []
    text_offset: list[int] = []
    for token, entries in positions:
        chosen = entries[token]
        tokens.append(legacy_token(chosen))
        values.append(finite(chosen.logprob))
        likeliest: dict[str, float] = {}
        for entry in by_rank(entries):  # ids may share a text: the likelier one stays
            likeliest.setdefault(legacy_token(entry), finite(entry.logprob))
        top.append(likeliest)
        text_offset.append(offsets.advance(chosen))
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": top,
        "text_offset": text_offset,
    }


def chat_logprobs(positions: Iterable[Position], top: int) -> dict[str, object]:
    """The chosen token, and beside it the `top` likeliest, whether it is among them or not."""
    return {
        "content": [
            chat_token(entries[token])
            | {"top_logprobs": [chat_token(e) for e in by_rank(entries) if e.rank <= top]}
            for token, entries in positions
        ],
        "refusal": None,
    }


def chat_token(entry: Logprob) -> dict[str, object]:
    raw = entry.token_bytes or entry.decoded_token.encode("utf-8", "replace")
    return {
        "token": entry.decoded_token,
        "logprob": finite(entry.logprob),
        "bytes": list(raw),
    }


def by_rank(entries: dict[int, Logprob]) -> list[Logprob]:
    return sorted(entries.values(), key=lambda entry: entry.rank)

"""Incremental detokenizing of one sequence, with stop strings. Must not know how ids are made.

Two kinds of text wait before they are released: bytes of an unfinished character (at most three)
and the longest end of the text that may still become a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jaxserve.text.tokenizer import Tokenizer


class _StopString:
    """How much of one stop string the text ends with: Knuth-Morris-Pratt, a character at a time."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str):
        self.text = text
        self.matched = 0  # characters
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            self._fallback[i] = self._next(self._fallback[i - 1], text[i])

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)

    def feed(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.text)


class Detokenizer:
    """Turns the output ids of one sequence into text that may be sent at once.

    The pieces from `push` and `flush` join to what all output ids mean when they follow the prompt,
    cut at the first stop string. A character that the prompt's last tokens began belongs to the
    output. Bytes that cannot become valid UTF-8 turn into U+FFFD as soon as that is certain.

    The first stop string to become complete ends the text; of those complete at the same character
    the longest. This does not depend on how the text falls into tokens or pushes, and needs no look
    ahead. Stop strings are looked for only in the text that the tokens after the first `min_tokens`
    add.

    stop_match: the stop string that ended the text, else None. num_tokens: output ids taken so far;
    those behind the one that completed a stop string are not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self.stop_match: str | None = None
        self.num_tokens = 0
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stops = [_StopString(text) for text in stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._strip_space = tokenizer.strips_leading_space and not any(
            self._visible(int(token)) for token in prompt_ids
        )
        self._decoder.decode(self._last_bytes(prompt_ids))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these further output ids release; "" once a stop string has been found."""
        released: list[str] = []
        for token in token_ids:
            if self.stop_match is not None:
                break
            self.num_tokens += 1
            text = self._decoder.decode(self._visible(int(token)))
            if text:
                released.append(self._release(self._stripped(text)))
        return "".join(released)

    def flush(self) -> str:
        """What is left when no more ids come: an unfinished character is one U+FFFD."""
        if self.stop_match is not None:
            return ""
        text = self._release(self._stripped(self._decoder.decode(b"", final=True)))
        held, self._held = self._held, ""
        return text + held if self.stop_match is None else text

    def _visible(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._token_bytes(token)

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The end of the prompt, at least the three bytes that an unfinished character can have."""
        tail = b""
        for token in reversed(prompt_ids):
            tail = self._visible(int(token)) + tail
            if len(tail) >= 3:
                break
        return tail

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _release(self, text: str) -> str:
        if not self._stops or self.num_tokens <= self._min_tokens:
            return text
        for i, character in enumerate(text, 1):
            complete = [stop for stop in self._stops if stop.feed(character)]
            if complete:
                first = max(complete, key=lambda stop: len(stop.text))
                self.stop_match = first.text
                whole = self._held + text[:i]
                self._held = ""
                return whole if self._include_stop else whole[: -len(first.text)]
        whole = self._held + text
        safe = len(whole) - max(stop.matched for stop in self._stops)
        self._held = whole[safe:]
        return whole[:safe]

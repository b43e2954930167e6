"""Answers as OpenAI writes them: whole JSON objects, and chunks as server-sent events.

Knows deltas and the wire format; nothing of HTTP or the engine. `ChunkWriter.chunk` runs once per
token and stream, so it formats only what changes and keeps the rest as ready text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.outputs import Delta
from jaxserve.server.logprobs import Position, TextOffsets, chat_logprobs, legacy_logprobs

DONE = b"data: [DONE]\n\n"
_CUT = ("timeout", "abort")  # the finish reasons that may come before the first token

# ASCII output: some clients split lines at U+2028 or U+0085, which JSON need not escape.
dumps = json.dumps


@dataclass(slots=True)
class Choice:
    """What has been seen of one choice, and what is held back for its next chunk."""

    index: int
    texts: list[str] = field(default_factory=list[str])
    positions: list[Position] = field(default_factory=list[Position])
    offsets: TextOffsets = field(default_factory=TextOffsets)
    num_tokens: int = 0
    begun: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def see(self, delta: Delta) -> None:
        self.num_tokens = delta.num_output_tokens
        if delta.logprobs is not None:
            self.positions.extend(zip(delta.token_ids, delta.logprobs, strict=True))
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class Shape(Protocol):
    """The difference between the endpoints. `top`: how many logprobs were asked for, if any."""

    id_prefix: str
    whole: str  # the "object" of an answer
    part: str  # the "object" of a chunk

    def chunk_text(self, text: str, begun: bool) -> str:
        """The chunk's member that carries the text, as JSON; `begun`: not the choice's first."""
        ...

    def message(self, text: str) -> dict[str, object]:
        """The members that carry the text of a whole choice."""
        ...

    def logprobs(self, choice: Choice, top: int) -> dict[str, object]:
        """The positions that a choice holds."""
        ...


class CompletionShape:
    id_prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def chunk_text(self, text: str, begun: bool) -> str:
        return f'"text":{dumps(text)}'

    def message(self, text: str) -> dict[str, object]:
        return {"text": text}

    def logprobs(self, choice: Choice, top: int) -> dict[str, object]:
        return legacy_logprobs(choice.positions, choice.offsets)


class ChatShape:
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def chunk_text(self, text: str, begun: bool) -> str:
        if not begun:
            return f'"delta":{{"role":"assistant","content":{dumps(text)}}}'
        return f'"delta":{{"content":{dumps(text)}}}' if text else '"delta":{}'

    def message(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: Choice, top: int) -> dict[str, object]:
        return chat_logprobs(choice.positions, top)


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every chunk of one answer."""

    id: str
    model: str
    created: int  # seconds since 1970
    prompt_tokens: int
    num_choices: int
    logprobs: int | None  # how many per token; None: not asked for


def usage(head: Head, choices: list[Choice]) -> dict[str, int]:
    completion = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": head.prompt_tokens + completion,
    }


def empty_end(choices: list[Choice]) -> str | None:
    """The reason of _CUT that ended the answer before any choice had a token, if one did."""
    if any(choice.num_tokens for choice in choices):
        return None
    return next((c.finish_reason for c in choices if c.finish_reason in _CUT), None)


class AnswerWriter:
    """Gathers a whole answer."""

    def __init__(self, shape: Shape, head: Head):
        self._shape = shape
        self._head = head
        self._choices = [Choice(index) for index in range(head.num_choices)]

    def add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.texts.append(delta.text)
        choice.see(delta)

    def empty_end(self) -> str | None:
        return empty_end(self._choices)

    def answer(self) -> dict[str, object]:
        head, shape = self._head, self._shape
        choices: list[dict[str, object]] = []
        for choice in self._choices:
            body: dict[str, object] = {"index": choice.index}
            body |= shape.message("".join(choice.texts))
            top = head.logprobs
            body["logprobs"] = None if top is None else shape.logprobs(choice, top)
            body["finish_reason"] = choice.finish_reason
            body["stop_reason"] = choice.stop_reason
            choices.append(body)
        return {
            "id": head.id,
            "object": shape.whole,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage(head, self._choices),
        }


class ChunkWriter:
    """Turns deltas into server-sent events, one per delta that a client can see."""

    def __init__(self, shape: Shape, head: Head, include_usage: bool, continuous_usage: bool):
        self._shape = shape
        self._head = head
        self._choices = [Choice(index) for index in range(head.num_choices)]
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._start = (
            f'data: {{"id":{dumps(head.id)},"object":"{shape.part}","created":{head.created},'
            f'"model":{dumps(head.model)},"choices":['
        )
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._held: list[bytes] = []  # ends of choices, while no choice has a token

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """None while there is nothing to show: text that is held back shows with the next chunk,
        and the end of a choice before the first token of any, with that token."""
        choice = self._choices[index]
        choice.see(delta)
        reason = delta.finish_reason
        if not delta.text and reason is None and not self._continuous_usage:
            return None
        text = self._shape.chunk_text(delta.text, choice.begun)
        choice.begun = True
        logprobs = "null"
        if choice.positions and self._head.logprobs is not None:
            logprobs = dumps(self._shape.logprobs(choice, self._head.logprobs))
            choice.positions.clear()
        finish = '"finish_reason":null}]'
        if reason is not None:
            stop_reason = dumps(delta.stop_reason)
            finish = f'"finish_reason":{dumps(reason)},"stop_reason":{stop_reason}}}]'
        end = self._end
        if self._continuous_usage:
            end = f',"usage":{dumps(usage(self._head, self._choices))}}}\n\n'
        chunk = (
            f'{self._start}{{"index":{index},{text},"logprobs":{logprobs},{finish}{end}'
        ).encode("ascii")
        if reason in _CUT and not any(choice.num_tokens for choice in self._choices):
            self._held.append(chunk)
            return None
        if self._held:
            chunk = b"".join(self._held) + chunk
            self._held.clear()
        return chunk

    def empty_end(self) -> str | None:
        return empty_end(self._choices)

    def end(self) -> bytes:
        """The usage chunk, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        total = dumps(usage(self._head, self._choices))
        return f'{self._start}],"usage":{total}}}\n\n'.encode("ascii") + DONE

"""Chat templates: messages to text, the way transformers renders them. Must not know token ids.

Templates come with the model, so they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from scheduler.errors import InvalidParameter, RequestError

Message = dict[str, Any]


class ChatTemplateError(RequestError):
    """The messages cannot be rendered: no template, or the template refuses them."""

    def __init__(self, message: str, *, code: str = "chat_template_error"):
        super().__init__(message, param="messages", code=code)


def normalise_messages(messages: Any) -> list[Message]:
    """A copy as templates expect it; InvalidParameter names the message and the field.

    Content given as a list of text parts becomes one string, joined by newlines; other kinds of
    parts are refused. Fields that are null are left out. The arguments of a tool call, a JSON
    string in the API, become the object that templates want.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidParameter("messages", "must be a list with at least one message")
    return [_normalise(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _normalise(where: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, "must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise InvalidParameter(f"{where}.role", f"must be a string, got {message.get('role')!r}")
    result = {name: value for name, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, list):
        result["content"] = "\n".join(
            _part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)
        )
    elif content is not None and not isinstance(content, str):
        raise InvalidParameter(
            f"{where}.content", f"must be a string or a list of text parts, got {content!r}"
        )
    calls = result.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return result


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidParameter(where, "must be an object with a type")
    if part["type"] != "text":
        raise InvalidParameter(where, f"type {part['type']!r} is not supported, only 'text'")
    if not isinstance(part.get("text"), str):
        raise InvalidParameter(f"{where}.text", f"must be a string, got {part.get('text')!r}")
    return part["text"]


def _with_parsed_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            try:
                return {**call, "function": {**function, "arguments": json.loads(arguments)}}
            except ValueError:
                return call
    return call


@lru_cache(maxsize=32)
def _compile(source: str) -> Any:
    # jinja2 takes 0.2 s to import: only who renders a chat pays for it.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes for HTML, which no model was trained on
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


class ChatTemplates:
    """The templates of one model by name, and the special tokens that they may write."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]):
        self._sources = dict(sources)
        self._variables = dict(variables)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def source(self, template: str | None, tools: Any) -> str:
        """`template` is a name or a source of its own; None takes "tool_use" when there are tools
        and such a template, else "default"."""
        if template is not None:
            return self._sources.get(template, template)
        names = ["tool_use"] * bool(tools) + ["default"]
        for name in names:
            if name in self._sources:
                return self._sources[name]
        if self._sources:
            known = ", ".join(sorted(self._sources))
            raise ChatTemplateError(f"choose one of this model's chat templates: {known}")
        raise ChatTemplateError(
            "This model has no chat template, which /v1/chat/completions needs. "
            "/v1/completions works.",
            code="no_chat_template",
        )

    def render(self, source: str, **inputs: Any) -> str:
        """The text; any error of the template, or its own refusal, is a ChatTemplateError."""
        try:
            return _compile(source).render(**{**self._variables, **inputs})
        except Exception as error:  # a template is a program: it can raise anything
            raise ChatTemplateError(f"chat template: {error}") from error


class ControlMarks:
    """Tells control tokens that a user wrote from those that the template wrote.

    In the user's strings a mark goes behind the first character of every control token: what the
    template then writes as a control token has none. Marks and stand-ins are made of Unicode
    noncharacters, which text for interchange does not contain; from user strings they are removed.
    """

    _MARK = "\U0010ffff"
    _FRAME = "\U0010fffe"

    def __init__(self, texts: Iterable[str]):
        self._texts = sorted(texts, key=len, reverse=True)
        self._stand_ins = {
            text: f"{self._FRAME}{i}{self._FRAME}" for i, text in enumerate(self._texts)
        }

    @property
    def stand_ins(self) -> Mapping[str, str]:
        """What `swap` writes for each control token."""
        return self._stand_ins

    def clean(self, text: str) -> str:
        return text.replace(self._MARK, "").replace(self._FRAME, "")

    def _any_in(self, text: str) -> str:
        """A pattern for the control tokens that are in `text`, longest first; "" for none. With a
        thousand of them one pattern for all is a hundred times slower than looking for each."""
        return "|".join(re.escape(control) for control in self._texts if control in text)

    def mark(self, value: Any) -> Any:
        """A copy of strings, lists and dicts with the control tokens in their strings marked."""
        if isinstance(value, str):
            value = self.clean(value)
            either = self._any_in(value)
            return re.sub(f"(?s)(?={either})(.)", rf"\1{self._MARK}", value) if either else value
        if isinstance(value, Mapping):
            return {key: self.mark(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(inner) for inner in value]
        return value

    def swap(self, rendered: str) -> str:
        """Control tokens without a mark become stand-ins; the marks go."""
        if either := self._any_in(rendered):
            written = f"(?:{either})(?!{self._MARK})"
            rendered = re.sub(written, lambda match: self._stand_ins[match[0]], rendered)
        return rendered.replace(self._MARK, "")

"""OpenAI request bodies as values: every field is honoured, or refused by name.

Knows the wire format of requests, not HTTP and not the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from jaxserve.server.fields import Fields, short
from jaxserve.server.options import Caller, read_options
from scheduler.errors import InvalidParameter, UnsupportedParameter
from scheduler.request import MAX_LOGPROBS, RequestOptions, SamplingParams

MAX_PROMPTS = 2048  # prompts in one completion request, and choices of all of them
MAX_TEMPERATURE = 2.0
DEFAULT_MAX_TOKENS = 16  # completions only; a chat answer may fill the context

# Fields with the same name and meaning in SamplingParams, which checks them.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "prompt_logprobs",
)

# Fields that clients send with the values under which they change nothing.
_NEUTRAL_BOTH: dict[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
}
_NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
}
_NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
}
# Labels: they say who asks and why, and have no effect on the answer.
_LABELS = ("safety_identifier", "prompt_cache_key")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Common:
    """What both endpoints ask for."""

    model: str | None
    params: SamplingParams
    options: RequestOptions
    stream: bool
    include_usage: bool  # one more chunk at the end
    continuous_usage: bool  # usage in every chunk
    request_id: str | None  # the caller's name for the request; need not be unique


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    common: Common
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    common: Common
    messages: list[dict[str, Any]]


def check_request_id(value: str, param: str) -> str:
    """It comes back in a header: printable ASCII without spaces, at most 128 characters."""
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidParameter(param, "must be 1 to 128 printable ASCII characters without spaces")
    return value


def parse_completion(body: dict[str, Any], vocab_size: int, caller: Caller) -> CompletionRequest:
    """Raises InvalidParameter, UnsupportedParameter or UnrecognizedArgument, naming the field."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"), vocab_size)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    _best_of(fields, body.get("n"))
    common = _common(fields, caller, _NEUTRAL_COMPLETION, logprobs, DEFAULT_MAX_TOKENS)
    choices = len(prompts) * common.params.n
    if choices > MAX_PROMPTS:
        raise InvalidParameter(
            "n", f"at most {MAX_PROMPTS} choices of all prompts are allowed, got {choices}"
        )
    return CompletionRequest(common, prompts)


def parse_chat(body: dict[str, Any], caller: Caller) -> ChatRequest:
    """Raises InvalidParameter, UnsupportedParameter or UnrecognizedArgument, naming the field."""
    fields = Fields(body)
    messages = _messages(fields.take("messages"))
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise InvalidParameter("top_logprobs", "is only allowed when logprobs is true")
    logprobs = (top or 0) if wanted else None
    common = _common(fields, caller, _NEUTRAL_CHAT, logprobs, None)
    return ChatRequest(common, messages)


def parse_tokenize(body: dict[str, Any]) -> tuple[str | None, str | None, list[dict[str, Any]]]:
    """(model, prompt, messages) of POST /tokenize; exactly one of prompt and messages is given."""
    fields = Fields(body)
    model, prompt, messages = fields.text("model"), fields.text("prompt"), fields.take("messages")
    chat = messages is not None
    if chat == (prompt is not None):
        raise InvalidParameter("prompt", "exactly one of prompt and messages is required")
    fields.only("add_special_tokens", not chat)
    fields.only("add_generation_prompt", True)
    fields.only("return_token_strs", False)
    fields.finish()
    return model, prompt, _messages(messages) if chat else []


def parse_detokenize(body: dict[str, Any], vocab_size: int) -> tuple[str | None, list[int]]:
    """(model, token ids) of POST /detokenize."""
    fields = Fields(body)
    model, tokens = fields.text("model"), fields.take("tokens")
    fields.finish()
    return model, _token_ids(tokens, "tokens", vocab_size) if tokens != [] else []


def _common(
    fields: Fields,
    caller: Caller,
    neutral: dict[str, tuple[object, ...]],
    logprobs: int | None,
    default_max_tokens: int | None,
) -> Common:
    model = fields.text("model")
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    request_id = fields.text("request_id")
    if request_id is not None:
        check_request_id(request_id, "request_id")
    options = read_options(fields, caller)
    max_tokens = _max_tokens(fields, default_max_tokens)
    given = {name: fields.take(name) for name in _SAMPLING}
    for name, accepted in (_NEUTRAL_BOTH | neutral).items():
        fields.only(name, *accepted)
    for name in _LABELS:
        fields.text(name)
    fields.object("metadata")
    fields.finish()
    temperature = given["temperature"]
    if isinstance(temperature, int | float) and not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidParameter(
            "temperature", f"must be between 0 and {MAX_TEMPERATURE:g}, got {short(temperature)}"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        **{name: value for name, value in given.items() if value is not None},
    )
    return Common(model, params, options, stream, include_usage, continuous_usage, request_id)


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    """max_completion_tokens is the newer name of max_tokens; both may be given if they agree."""
    old = fields.integer("max_tokens", 1)
    new = fields.integer("max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise InvalidParameter(
            "max_completion_tokens", f"differs from max_tokens ({new} against {old}); give one"
        )
    if old is None and new is None:
        return default
    return new if old is None else old


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    given = fields.object("stream_options")
    if given is None:
        return False, False
    if not stream:
        raise InvalidParameter("stream_options", "is only allowed when stream is true")
    options = Fields(given, "stream_options.")
    usage = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    options.only("include_obfuscation", False)
    options.finish()
    return usage, continuous


def _best_of(fields: Fields, n: Any) -> None:
    best_of = fields.integer("best_of", 0, 128)
    n = 1 if n is None else n
    if best_of is None or best_of == n or not isinstance(n, int):
        return
    if best_of < n:
        raise InvalidParameter("best_of", f"must not be less than n ({best_of} < {n})")
    raise UnsupportedParameter("best_of", f"only n ({n}) is supported by this server")


def _prompts(value: Any, vocab_size: int) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        got = "nothing" if value is None else short(cast(object, value))
        raise InvalidParameter(
            "prompt",
            "must be a string, a list of strings, a list of token ids or a list of those, "
            f"and not empty, got {got}",
        )
    items = cast(list[Any], value)
    if isinstance(items[0], int):
        return [_token_ids(items, "prompt", vocab_size)]
    if len(items) > MAX_PROMPTS:
        raise InvalidParameter(
            "prompt", f"at most {MAX_PROMPTS} prompts are allowed, got {len(items)}"
        )
    if all(isinstance(item, str) for item in items):
        return items
    return [_token_ids(item, "prompt", vocab_size, f"[{i}]") for i, item in enumerate(items)]


def _token_ids(value: Any, param: str, vocab_size: int, where: str = "") -> list[int]:
    """`where` is the place inside the field, for the message: "[3]" for the fourth prompt."""
    if not isinstance(value, list):
        raise InvalidParameter(param, f"{where} must be a list of token ids".lstrip())
    ids = cast(list[Any], value)
    if not ids:
        raise InvalidParameter(param, f"{where} must not be empty".lstrip())
    for i, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidParameter(
                param, f"{where}[{i}] must be an integer token id, got {short(token)}"
            )
        if not 0 <= token < vocab_size:
            raise InvalidParameter(
                param,
                f"{where}[{i}] must be a token id between 0 and {vocab_size - 1}, got {token}",
            )
    return ids


_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidParameter("messages", "must be a list with at least one message")
    return [_message(item, i) for i, item in enumerate(cast(list[Any], value))]


def _message(value: Any, i: int) -> dict[str, Any]:
    """A message as templates read it: role and one string. developer is system's newer name."""
    where = f"messages[{i}]"
    if not isinstance(value, dict):
        raise InvalidParameter(where, f"must be an object, got {short(value)}")
    fields = Fields(cast(dict[str, Any], value), where + ".")
    role = fields.text("role")
    if role in ("tool", "function"):
        raise UnsupportedParameter(f"{where}.role", f"{role!r} is not supported by this server")
    if role not in _ROLES:
        names = ", ".join(_ROLES)
        raise InvalidParameter(f"{where}.role", f"must be one of {names}, got {short(role)}")
    message = {"role": _ROLES[role], "content": _content(fields.take("content"), where)}
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    for empty in ("tool_calls", "annotations"):
        fields.only(empty, [])
    for absent in ("function_call", "audio", "refusal", "tool_call_id"):
        fields.only(absent)
    fields.finish()
    return message


def _content(value: Any, where: str) -> str:
    """A string, or text parts, which are joined by newlines."""
    where += ".content"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        got = "nothing" if value is None else short(value)
        raise InvalidParameter(where, f"must be a string or a list of text parts, got {got}")
    texts: list[str] = []
    for i, part in enumerate(cast(list[Any], value)):
        if not isinstance(part, dict):
            raise InvalidParameter(f"{where}[{i}]", f"must be an object, got {short(part)}")
        fields = Fields(cast(dict[str, Any], part), f"{where}[{i}].")
        fields.only("type", "text")
        text = fields.text("text")
        if text is None:
            raise InvalidParameter(f"{where}[{i}].text", "is required")
        texts.append(text)
        fields.finish()
    return "\n".join(texts)

"""What a client asks for (`SamplingParams`, `Request`, both frozen) and the one mutable record of
its progress (`Sequence`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import numpy as np

from scheduler.errors import InvalidParameter, UnsupportedParameter

MAX_LOGPROBS = 20  # logprob counts are padded to this, so that they never select an executable
MAX_SUPPRESSED = 8  # ids that a row can suppress while min_tokens is not reached
MAX_STOP_STRINGS = 16
GREEDY_BELOW = 1e-4  # a temperature below this takes the likeliest token
MAX_N = 128
MAX_NAME = 256  # characters of a tenant, profile or cache salt
MAX_TIMEOUT = 1e6  # seconds


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameter(name, f"must be {limit}, got {value}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(name, f"must be a number, got {value!r}")
    if not low <= value <= high:  # nor is NaN, and an int may be too large for a float
        raise InvalidParameter(name, f"must be between {low:g} and {high:g}, got {value}")


def _stop_strings(value: Any) -> tuple[str, ...]:
    items = _items("stop", [value] if isinstance(value, str) else value)
    for item in items:
        if not isinstance(item, str):
            raise InvalidParameter("stop", f"must be a string or a list of strings, got {item!r}")
        if not item:
            raise InvalidParameter("stop", "must not contain an empty string")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidParameter(
            "stop", f"at most {MAX_STOP_STRINGS} strings are allowed, got {len(items)}"
        )
    return tuple(items)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = _items(name, value)
    for item in items:
        _integer(name, item, 0, 2**31 - 1)
    return tuple(items)


def _items(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, tuple | list):
        raise InvalidParameter(name, f"must be a list, got {value!r}")
    return list(cast(list[Any], value))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. The field names are those that vLLM users know.

    temperature 0 (or below 1e-4) is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch the filter
    off. `logprobs` = n reports the chosen token and the n likeliest. Values are checked when the
    object is made: InvalidParameter names the field and the limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidParameter("top_p", "must be greater than 0, got 0")
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"must not exceed max_tokens ({self.min_tokens} > {self.max_tokens})"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)
        )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"must be a boolean, got {getattr(self, name)!r}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        for name, value in neutral.items():
            _number(name, getattr(self, name), -1e6, 1e6)
            if getattr(self, name) != value:
                raise UnsupportedParameter(name, f"only {value} is supported by this server")
        if self.logit_bias:
            raise UnsupportedParameter("logit_bias")
        if self.prompt_logprobs is not None:
            raise UnsupportedParameter("prompt_logprobs")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is treated among others; none of it changes its tokens.

    priority: lower values are more important (under the priority policy). tenant: who is charged
    under the fair policy. profile: a class of requests with similar lengths; the tenant where it is
    empty. timeout: seconds from arrival until the request ends with what it has. cache_salt:
    only requests with the same salt share cached prefixes.
    """

    priority: int = 0
    tenant: str = ""
    profile: str = ""
    timeout: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        for name in ("tenant", "profile", "cache_salt"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidParameter(name, f"must be a string, got {value!r}")
            if len(value) > MAX_NAME:
                raise InvalidParameter(
                    name, f"must have at most {MAX_NAME} characters, got {len(value)}"
                )
        if self.timeout is not None:
            _number("timeout", self.timeout, 0.0, MAX_TIMEOUT)
            if self.timeout == 0:
                raise InvalidParameter("timeout", "must be greater than 0, got 0")


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one client request, resolved against a model: token ids, limits, stop ids.

    `key` is the row's random key: every random draw depends on (key, position) alone, so that the
    text is the same whatever the batch (key = mix(seed, choice)).
    """

    request_id: str
    prompt: np.ndarray  # int32[prompt_tokens]
    params: SamplingParams
    max_tokens: int  # after clamping to the context and the pool; at least 1
    arrival: float  # seconds, the engine's clock
    stop_ids: frozenset[int] = frozenset()  # eos ids (unless ignored) and the request's own
    key: tuple[int, int] = (0, 0)  # uint32, uint32
    options: RequestOptions = RequestOptions()

    @property
    def deadline(self) -> float | None:
        """Seconds on the engine's clock."""
        timeout = self.options.timeout
        return None if timeout is None else self.arrival + timeout


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine: `num_computed` tokens chase `num_tokens`.

    tokens: prompt and output ids known on the host. A token that is sampled but not yet read back
    is counted in `num_pending`; the device knows it as the slot's last token.
    """

    request: Request
    tokens: list[int]
    order: int  # arrival rank; ties and victims are decided by it
    status: Status = Status.WAITING
    slot: int = -1
    num_computed: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    most_computed: int = 0  # before the last preemption: what lies below is computed again
    pages: list[int] = field(default_factory=list[int])
    num_shared: int = 0  # tokens in pages that it found when it started
    num_learnt: int = 0  # leading pages that the prefix index has seen
    hashes: list[bytes] = field(default_factory=list[bytes])  # the root's, then one a full page
    claims: list[bytes] = field(default_factory=list[bytes])  # pages that the host keeps for it
    profile: int = 0  # the length model's
    finish_reason: str | None = None
    first_token_at: float | None = None  # seconds, the engine's clock
    last_token_at: float = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

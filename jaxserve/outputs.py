"""What the engine gives back: deltas on the way, whole outputs at the end. Plain data, no jax."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """rank is 1 for the likeliest token. decoded_token may hold U+FFFD for part of a character;
    `token_bytes` is exact."""

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step adds to one sequence.

    text holds whole characters only and never any part of a stop string; it may be empty (held
    back). logprobs has one dict per id in token_ids ({token_id: Logprob}), or is None when not
    asked for. finish_reason: None until the last delta; then "stop", "length", "timeout", "abort"
    or "error". stop_reason: the stop string or stop token id that ended it, if one did.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far
    error: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the chosen tokens; None when logprobs were not asked for."""
        if self.logprobs is None:
            return None
        return sum(p[t].logprob for p, t in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True

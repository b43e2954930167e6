"""What the server needs of an engine; the server and its tests know nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from jaxserve.outputs import Delta
from scheduler.request import RequestOptions, SamplingParams

State = Literal["loading", "ready", "draining", "stuck", "failed"]


class Stream(Protocol):
    """The answer to one prompt: (choice, delta) pairs until every choice has its finish_reason.

    finish_reason "timeout": the deadline came first; "abort": the server is ending. What had been
    made until then has been delivered.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> tuple[int, Delta]: ...

    def abort(self) -> None:
        """The client has left: end every choice. Idempotent, and harmless after the end."""
        ...


class HistogramLike(Protocol):
    @property
    def bounds(self) -> tuple[float, ...]: ...  # seconds, ascending

    @property
    def counts(self) -> Sequence[int]: ...  # one per bucket and one above, not cumulative

    @property
    def sum(self) -> float: ...


class StatsSnapshot(Protocol):
    """Plain numbers, read on the event loop while the engine's thread writes them."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def queue_tokens(self) -> int: ...
    @property
    def pages_free(self) -> int: ...
    @property
    def pages_cached(self) -> int: ...
    @property
    def pages_held(self) -> int: ...
    @property
    def pages_reserved(self) -> int: ...
    @property
    def host_pages(self) -> Mapping[str, int]: ...  # free, cached, held
    @property
    def pages_copied(self) -> Mapping[str, int]: ...  # out, back
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def prefix_tokens(self) -> Mapping[str, int]: ...  # queried, hit, hit_host
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def preemptions(self) -> Mapping[str, int]: ...
    @property
    def compilations(self) -> Mapping[str, int]: ...
    @property
    def plan_tokens(self) -> Mapping[str, int]: ...
    @property
    def finished(self) -> Mapping[str, int]: ...
    @property
    def requests_refused(self) -> Mapping[str, int]: ...  # requests, tokens, wait
    @property
    def time_to_first_token(self) -> HistogramLike: ...
    @property
    def inter_token_latency(self) -> HistogramLike: ...


class EngineClient(Protocol):
    """An engine on its own thread, seen from the event loop. No method here blocks on a step.

    The three properties are valid once `state()` has been "ready".
    """

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def state(self) -> State: ...

    async def wait_ready(self) -> None:
        """Returns when the model is loaded and warm; raises what stopped it (ConfigError, ...)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt. Long ones are encoded on a worker thread: it must be safe."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special ones written out."""
        ...

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation through the model's template; RequestError if it refuses."""
        ...

    def submit(
        self,
        requests: Sequence[tuple[str, list[int]]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        arrival: float,
    ) -> Sequence[Stream]:
        """Add `params.n` choices of every (unique request id, prompt), or nothing at all.

        One stream per prompt, in order. arrival: time.monotonic() when the request had come in;
        its deadline counts from there, and may have passed. Raises RequestError before anything is
        added: PromptTooLong, PromptExceedsPool, QueueFull (all choices of all prompts count).
        """
        ...

    def stats(self) -> StatsSnapshot: ...

    async def drain(self, timeout: float) -> None:
        """Take nothing new; end what runs, at the latest after `timeout` seconds with "abort"."""
        ...

    async def close(self) -> None: ...

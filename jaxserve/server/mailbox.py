"""The event loop's end of one request: deltas come in per engine step, a handler takes them out.

Everything here runs on the event loop. The engine's thread reaches it with one call_soon_threadsafe
per step, whatever the number of mailboxes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from jaxserve.outputs import Delta


def join(a: Delta, b: Delta) -> Delta:
    """Two consecutive deltas of one choice as one."""
    logprobs = None
    if a.logprobs is not None or b.logprobs is not None:
        logprobs = (a.logprobs or ()) + (b.logprobs or ())
    return Delta(
        request_id=a.request_id,
        text=a.text + b.text,
        token_ids=a.token_ids + b.token_ids,
        logprobs=logprobs,
        finish_reason=b.finish_reason,
        stop_reason=b.stop_reason,
        num_prompt_tokens=b.num_prompt_tokens,
        num_output_tokens=b.num_output_tokens,
        error=b.error,
    )


class Mailbox:
    """A `Stream` that holds at most `limit` deltas (two per choice, if that is more).

    A reader that falls behind never makes it grow: the deltas of each choice are joined, so that
    what is held is bounded by the text itself. on_abort is called once, if the reader leaves before
    the end.
    """

    def __init__(self, choices: int, on_abort: Callable[[], None], limit: int = 64):
        self._open = choices  # choices without a finish_reason yet
        self._on_abort = on_abort
        self._limit = max(limit, 2 * choices)
        self._deltas: deque[tuple[int, Delta]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._aborted = False

    def __len__(self) -> int:
        return len(self._deltas)

    def put(self, choice: int, delta: Delta) -> None:
        """Add what a step made for one choice. Ignored once the reader has left."""
        if self._aborted:
            return
        if delta.finish_reason is not None:
            self._open -= 1
        self._deltas.append((choice, delta))
        if len(self._deltas) > self._limit:
            self._join_all()
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while not self._deltas:
            if self._open <= 0 or self._aborted:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._deltas.popleft()

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        self._deltas.clear()
        self._wake()
        if self._open > 0:
            self._on_abort()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _join_all(self) -> None:
        joined: dict[int, Delta] = {}
        for choice, delta in self._deltas:
            joined[choice] = join(joined[choice], delta) if choice in joined else delta
        self._deltas = deque(joined.items())

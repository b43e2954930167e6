"""Several prompts of one HTTP request as one stream: prompt i, choice j becomes choice i*n + j."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from jaxserve.outputs import Delta
from jaxserve.server.client import Stream

_WAITING = 16  # deltas between the pumps and the reader; the streams hold (and join) the rest

Item = tuple[int, Delta]


class MergedStream:
    """Reads all streams at once. Made inside a running event loop; `abort` must be called."""

    def __init__(self, streams: Sequence[Stream], choices: int):
        self._streams = streams
        self._queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(_WAITING)
        self._running = len(streams)
        self._pumps = [
            asyncio.create_task(self._pump(stream, i * choices)) for i, stream in enumerate(streams)
        ]

    async def _pump(self, stream: Stream, base: int) -> None:
        end: BaseException | None = None
        try:
            async for choice, delta in stream:
                await self._queue.put((base + choice, delta))
        except Exception as error:
            end = error
        await self._queue.put(end)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        while self._running:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                return item
            self._running -= 1
        raise StopAsyncIteration

    def abort(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.abort()


def merge(streams: Sequence[Stream], choices: int) -> Stream:
    return streams[0] if len(streams) == 1 else MergedStream(streams, choices)

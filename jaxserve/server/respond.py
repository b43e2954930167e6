"""Sending an answer: whole, or as a stream that neither a slow nor a lost client can hold up.

A request that its deadline ended (finish_reason "timeout") is answered with what it has, as if it
had come to its end: 200, and every choice that was not complete says "timeout", with or without
text. Only if no choice had made a token is there nothing to answer: 504, for both kinds of answer.
In the same way, one that the end of the server cut ("abort") is 503 if it has nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Self

from aiohttp import web

from jaxserve.outputs import Delta
from jaxserve.server.client import Stream
from jaxserve.server.errors import EngineFault, NotReady, error_event
from jaxserve.server.shapes import DONE, AnswerWriter, ChunkWriter
from scheduler.errors import DeadlineExceeded, RequestError

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it

_SMALL_WRITE = 32 * 1024  # bytes; a transport makes writers wait above 64 KiB

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How long something may last, in seconds."""

    timeout: float | None  # the request, from its arrival; the engine sees to it
    slow_reader: float  # one write, for a client that does not read
    keepalive: float  # the silence of a stream that has begun


class KeepAlive:
    """Comments in a stream that has begun and pauses, so that nobody on the way gives it up.

    One task per stream, which sleeps until the silence can have lasted; an event costs it one look
    at the clock. It writes only where that can't wait, so never to a client that does not read; and
    a write is whole before anything else runs, so never inside an event.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse, seconds: float):
        self._request = request
        self._response = response
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    def wrote(self) -> None:
        """An event has been written; the first one begins the watch."""
        self._last = self._loop.time()
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while True:
            rest = self._last + self._seconds - self._loop.time()
            if rest > 0:
                await asyncio.sleep(rest)
                continue
            self._last = self._loop.time()
            if _taken_at_once(self._request, KEEP_ALIVE):
                try:
                    await self._response.write(KEEP_ALIVE)
                except ConnectionError:
                    return


def _check(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise EngineFault(delta.error or "The engine failed.")


def _nothing(reason: str, limits: Limits) -> RequestError:
    """Why an answer has no token."""
    if reason == "abort":
        return NotReady("draining")
    assert limits.timeout is not None, "a deadline that nobody set"
    return DeadlineExceeded(limits.timeout)


async def answer_whole(
    request: web.Request, stream: Stream, answer: AnswerWriter, limits: Limits
) -> web.Response:
    """Raises EngineFault if the engine gives up, DeadlineExceeded or NotReady if it is empty."""
    async for choice, delta in stream:
        _check(delta)
        answer.add(choice, delta)
    reason = answer.empty_end()
    if reason is not None:
        raise _nothing(reason, limits)
    response = web.json_response(answer.answer())
    await response.prepare(request)
    await _finish(request, response, limits.slow_reader)
    return response


async def answer_stream(
    request: web.Request, stream: Stream, writer: ChunkWriter, limits: Limits
) -> web.StreamResponse:
    """Server-sent events, from the first one that has something to show.

    Until then the status is open, so an early EngineFault, DeadlineExceeded or NotReady is raised
    and becomes a plain error answer; a later EngineFault becomes an event. A client that lets a
    write wait for limits.slow_reader seconds is disconnected.
    """
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    try:
        with KeepAlive(request, response, limits.keepalive) as keepalive:
            async for choice, delta in stream:
                _check(delta)
                chunk = writer.chunk(choice, delta)
                if chunk is None:
                    continue
                if not response.prepared:
                    await response.prepare(request)
                if _taken_at_once(request, chunk):  # nearly always; a timer costs as much again
                    await response.write(chunk)
                else:
                    async with asyncio.timeout(limits.slow_reader):
                        await response.write(chunk)
                keepalive.wrote()
        reason = writer.empty_end()
        if reason is not None and not response.prepared:
            raise _nothing(reason, limits)
        last = writer.end()
    except EngineFault as fault:
        if not response.prepared:
            raise
        last = error_event(fault) + DONE
    except TimeoutError:
        _disconnect(request, limits.slow_reader)
        return response
    except ConnectionError:
        return response
    await _finish(request, response, limits.slow_reader, last)
    return response


def _taken_at_once(request: web.Request, chunk: bytes) -> bool:
    """Whether writing cannot wait: nothing is unsent, and this is below the transport's limit."""
    transport = request.transport
    return (
        transport is not None
        and transport.get_write_buffer_size() == 0
        and len(chunk) <= _SMALL_WRITE
    )


async def _finish(
    request: web.Request, response: web.StreamResponse, timeout: float, last: bytes = b""
) -> None:
    try:
        async with asyncio.timeout(timeout):
            if last:
                await response.write(last)
            await response.write_eof()
    except TimeoutError:
        _disconnect(request, timeout)
    except ConnectionError:
        pass


def _disconnect(request: web.Request, timeout: float) -> None:
    log.warning("a client did not read its stream for %g s and was disconnected", timeout)
    if request.transport is not None:
        request.transport.abort()

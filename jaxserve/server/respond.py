"""Sending an answer: whole, or as a stream that neither a slow nor a lost client can hold up."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from jaxserve.outputs import Delta
from jaxserve.server.client import Stream
from jaxserve.server.errors import EngineFault, error_event
from jaxserve.server.shapes import DONE, AnswerWriter, ChunkWriter, Head, Shape

log = logging.getLogger(__name__)

_SMALL_WRITE = 32 * 1024  # bytes; a transport makes writers wait above 64 KiB

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def _check(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise EngineFault(delta.error or "The engine failed.")


async def answer_whole(
    request: web.Request, stream: Stream, shape: Shape, head: Head, timeout: float
) -> web.Response:
    """Raises EngineFault if the engine gives up."""
    answer = AnswerWriter(shape, head)
    async for choice, delta in stream:
        _check(delta)
        answer.add(choice, delta)
    response = web.json_response(answer.answer())
    await response.prepare(request)
    await _finish(request, response, timeout)
    return response


async def answer_stream(
    request: web.Request, stream: Stream, writer: ChunkWriter, timeout: float
) -> web.StreamResponse:
    """Server-sent events, from the first one that has something to show.

    Until then the status is open, so an early EngineFault is raised and becomes a plain error
    answer; later it becomes an event. A client that lets a write wait for `timeout` seconds is
    disconnected.
    """
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    try:
        async for choice, delta in stream:
            _check(delta)
            chunk = writer.chunk(choice, delta)
            if chunk is None:
                continue
            if not response.prepared:
                await response.prepare(request)
            if _taken_at_once(request, chunk):  # nearly always, and a timer costs as much again
                await response.write(chunk)
            else:
                async with asyncio.timeout(timeout):
                    await response.write(chunk)
        last = writer.end()
    except EngineFault as fault:
        if not response.prepared:
            raise
        last = error_event(fault) + DONE
    except TimeoutError:
        _disconnect(request, timeout)
        return response
    except ConnectionError:
        return response
    await _finish(request, response, timeout, last)
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

"""The life of a serving process: bind, load, serve, drain on a signal, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from aiohttp import web

from jaxserve.server.app import FRONT, MAX_BODY, create_app
from jaxserve.server.client import EngineClient

_BACKLOG = 1024
_LAST_WRITES = 5.0  # seconds for handlers to send what the drained engine has made


def bind(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free port). OSError says that it cannot be had."""
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = info[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class Server:
    """One app on one socket, and the two steps of its end.

    on_ready is called once the engine can serve, on_stop when the first signal arrives. exit_now
    ends the process on the second.
    """

    def __init__(
        self,
        client: EngineClient,
        sock: socket.socket,
        *,
        drain_timeout: float = 30.0,
        slow_reader_timeout: float = 60.0,
        keepalive: float = 5.0,
        max_body_bytes: int = MAX_BODY,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        exit_now: Callable[[int], object] = os._exit,
    ):
        self._client = client
        self._sock = sock
        self._drain_timeout = drain_timeout
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._exit_now = exit_now
        self._app = create_app(
            client,
            slow_reader_timeout=slow_reader_timeout,
            keepalive=keepalive,
            max_body_bytes=max_body_bytes,
        )
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`, then drain. Raises what kept the engine from loading."""
        runner = web.AppRunner(
            self._app, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WRITES
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self._sock, backlog=_BACKLOG).start()
            if await self._until_ready_or_stopped():
                self._on_ready()
                await self._stop.wait()
            await self._client.drain(self._drain_timeout)
        finally:
            await runner.cleanup()
            await self._client.close()

    async def _until_ready_or_stopped(self) -> bool:
        ready = asyncio.create_task(self._client.wait_ready())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
            return not self._stop.is_set()
        finally:
            for task in (ready, stopped):
                task.cancel()
            await asyncio.wait({ready, stopped})

    def stop(self) -> None:
        """The first call drains, the second ends the process at once."""
        if self._stop.is_set():
            self._exit_now(130)
            return
        self._app[FRONT].draining = True
        self._stop.set()
        self._on_stop()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT call `stop`, on the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

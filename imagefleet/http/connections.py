"""Connections of an HTTP server: how many it has at once, and for how long one may be idle."""

import asyncio
import contextlib
import os
import socket
import time
from asyncio import BaseProtocol, TimerHandle
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler

#: Seconds within which a request's header has to arrive, and its answer has to be taken.
IDLE_SECONDS = 60.0

#: The most connections, where the system allows as many files. Beyond them the one that has been
#: idle for longest is closed: each costs some 40 KB.
MOST = 4_000

#: Connections that the system keeps until they are accepted, and that are accepted in one turn of
#: the event loop: a thousand that come at once must not keep the others waiting.
BACKLOG = 2_048
AT_ONCE = 16

#: Files beside the connections: those of the storage.
_OTHER_FILES = 200

_SWEEP_SECONDS = 1.0


class Connections:
    """Accepts connections, and closes those that keep a place without a request.

    So neither half a header nor an answer that nobody takes keeps others out.
    """

    def __init__(self) -> None:
        self.most = _most_files()
        self.server: web.Server | None = None
        self._idle_since: dict[BaseProtocol, float] = {}  # the oldest first
        self._busy: set[BaseProtocol] = set()

    def accept(self) -> BaseProtocol:
        """The protocol of a new connection, for which there is room then."""
        if self.server is None:
            raise RuntimeError("the server has not started")
        if len(self.server.connections) >= self.most and self._idle_since:
            self._close(next(iter(self._idle_since)))
        connection = self.server()
        self._idle_since[connection] = time.monotonic()
        return connection

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: a connection is not idle while its request is answered."""
        if len(self._busy) >= self.most:
            raise web.HTTPServiceUnavailable(text="too many connections: try again\n")
        connection = request.protocol
        self._idle_since.pop(connection, None)
        self._busy.add(connection)
        try:
            return await handler(request)
        finally:
            self._busy.discard(connection)
            self._idle_since[connection] = time.monotonic()

    @contextlib.contextmanager
    def sweeping(self) -> Iterator[None]:
        """Closes connections that have been idle for too long, while the block runs."""
        self._timer = self._next_sweep()
        try:
            yield
        finally:
            self._timer.cancel()

    def _next_sweep(self) -> TimerHandle:
        return asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._timer = self._next_sweep()
        known = set(self.server.connections if self.server else ())
        latest = time.monotonic() - IDLE_SECONDS
        for connection, since in list(self._idle_since.items()):
            if connection not in known or since < latest:
                self._close(connection)

    def _close(self, connection: BaseProtocol) -> None:
        self._idle_since.pop(connection, None)
        transport = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()  # whatever waits to be sent


def keep_waiting(listener: socket.socket) -> None:
    """Has the system keep as many connections as there may be, however few are accepted at once.

    asyncio accepts in one turn as many as it has the system keep.
    """
    with socket.socket(fileno=os.dup(listener.fileno())) as same:
        same.listen(BACKLOG)


def _most_files() -> int:
    """The most connections for the files that the system allows, which it is asked to raise."""
    try:
        import resource  # not on every system
    except ImportError:
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + _OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(MOST, soft - _OTHER_FILES))

"""A proxy between clients and Azurite whose requests suffer faults."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
from aiohttp import web
from yarl import URL

#: An HTTP status, perhaps with an error code of Azure, or what happens to the connection.
Fault = (
    Literal[
        "pass",
        "drop",
        "lose reply",
        "hang",
        "garbage",
        "delay",
        "truncate",
        "slow reply",
    ]
    | int
    | tuple[int, str]
)

#: Of a delayed request, and of a reply that arrives slowly.
DELAY_SECONDS = 0.7

#: Statuses with which Azure asks for a pause.
_BUSY = {429, 503}

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(slots=True)
class FaultProxy:
    """Forwards requests to Azurite; `next_fault` says what each of them suffers."""

    next_fault: Callable[[], Fault]
    #: The connection string for clients, once it runs.
    address: str = ""
    requests: int = 0
    delay_seconds: float = DELAY_SECONDS
    #: Ends the requests that hang.
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def running(self, azurite_address: str) -> AsyncIterator[None]:
        runners = []
        async with aiohttp.ClientSession(auto_decompress=False) as session:

            async def behind_proxy(upstream: str) -> str:
                async def handler(request: web.BaseRequest) -> web.StreamResponse:
                    return await self._answer(request, upstream, session)

                runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0)
                await runner.setup()
                runners.append(runner)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                return f"http://{host}:{port}"

            self.address = azurite_address
            for upstream in re.findall(r"http://127\.0\.0\.1:\d+", azurite_address):
                self.address = self.address.replace(
                    upstream, await behind_proxy(upstream)
                )
            try:
                yield
            finally:
                self.over.set()
                for runner in runners:
                    await runner.cleanup()

    async def _answer(
        self, request: web.BaseRequest, upstream: str, session: aiohttp.ClientSession
    ) -> web.StreamResponse:
        self.requests += 1
        body = await request.read()
        fault = self.next_fault()
        match fault:
            case int():
                return web.Response(
                    status=fault,
                    headers={"Retry-After": "1"} if fault in _BUSY else None,
                )
            case (status, code):
                return web.Response(status=status, headers={"x-ms-error-code": code})
            case "garbage":
                return web.Response(
                    text="<Half><An>ans", content_type="application/xml"
                )
            case "hang":
                await self.over.wait()
            case "delay":
                await asyncio.sleep(self.delay_seconds)
        if fault not in {"drop", "hang"}:
            reply = await self._forward(request, body, upstream, session)
            if fault in {"pass", "delay"}:
                return reply
            if fault in {"truncate", "slow reply"}:
                return await self._part_by_part(
                    request, reply, whole=fault == "slow reply"
                )
        if request.transport is not None:  # the client may have given up
            request.transport.abort()
        return web.Response()

    async def _forward(
        self,
        request: web.BaseRequest,
        body: bytes,
        upstream: str,
        session: aiohttp.ClientSession,
    ) -> web.Response:
        async with session.request(
            request.method,
            URL(upstream + request.raw_path, encoded=True),
            data=body,
            headers=request.headers,
            skip_auto_headers=["Content-Type"],  # it is part of the signature
        ) as reply:
            is_head = (
                request.method == "HEAD"
            )  # whose length is that of a body that is not sent
            headers = {
                name: value
                for name, value in reply.headers.items()
                if name.lower() not in _HOP_BY_HOP
                or (is_head and name == "Content-Length")
            }
            body = None if is_head else await reply.read()
            return web.Response(body=body, status=reply.status, headers=headers)

    async def _part_by_part(
        self, request: web.BaseRequest, reply: web.Response, *, whole: bool
    ) -> web.StreamResponse:
        """Sends a reply in two parts with a pause; unless *whole*, the connection breaks there."""
        body = reply.body if isinstance(reply.body, bytes) else b""
        streamed = web.StreamResponse(status=reply.status, headers=reply.headers)
        if request.method != "HEAD":
            streamed.content_length = len(body) + (not whole and not body)
        await streamed.prepare(request)
        await streamed.write(body[: len(body) // 2])
        await asyncio.sleep(self.delay_seconds)
        if whole:
            with contextlib.suppress(ConnectionError):  # the client has gone
                await streamed.write(body[len(body) // 2 :])
                await streamed.write_eof()
        elif request.transport is not None:
            request.transport.abort()
        return streamed

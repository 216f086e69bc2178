"""A proxy that injects faults between a client and Azurite."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

Fault = Literal["pass", "drop", "lose reply", "hang", "garbage"] | int | tuple[int, str]
"""An HTTP status, perhaps with an error code of Azure, or what happens to the connection."""


@dataclass(slots=True)
class FaultyAzurite:
    """Forwards requests; each of the next ones suffers the next of `faults`."""

    address: str = ""
    faults: deque[Fault] = field(default_factory=deque)
    requests: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(
        self, request: web.Request, upstream: str, session: aiohttp.ClientSession
    ) -> web.StreamResponse:
        self.requests += 1
        body = await request.read()
        fault = self.faults.popleft() if self.faults else "pass"
        match fault:
            case int():
                return web.Response(status=fault)
            case (status, code):
                return web.Response(status=status, headers={"x-ms-error-code": code})
            case "garbage":
                return web.Response(text="<Half><An>ans", content_type="application/xml")
            case "hang":
                await self.over.wait()
        if fault in {"pass", "lose reply"}:
            reply = await _forward(request, body, upstream, session)
            if fault == "pass":
                return reply
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


async def _forward(
    request: web.Request, body: bytes, upstream: str, session: aiohttp.ClientSession
) -> web.Response:
    hop_by_hop = {"connection", "keep-alive", "transfer-encoding", "content-length"}
    async with session.request(
        request.method,
        URL(upstream + request.raw_path, encoded=True),
        data=body,
        headers=request.headers,
        skip_auto_headers=["Content-Type"],  # it is part of the signature
    ) as reply:
        headers = {
            name: value for name, value in reply.headers.items() if name.lower() not in hop_by_hop
        }
        return web.Response(body=await reply.read(), status=reply.status, headers=headers)


@pytest.fixture
async def faulty_azurite(azurite_address: str) -> AsyncIterator[FaultyAzurite]:
    """Azurite behind a fault-injecting proxy."""
    faulty = FaultyAzurite()
    runners = []

    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def behind_proxy(upstream: str) -> str:
            async def handler(request: web.Request) -> web.StreamResponse:
                return await faulty.answer(request, upstream, session)

            runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            return f"http://{host}:{port}"

        faulty.address = azurite_address
        for upstream in re.findall(r"http://127\.0\.0\.1:\d+", azurite_address):
            faulty.address = faulty.address.replace(upstream, await behind_proxy(upstream))
        yield faulty
        faulty.over.set()
        for runner in runners:
            await runner.cleanup()

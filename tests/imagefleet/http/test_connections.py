"""Connections that keep a server waiting, and others that it has to answer meanwhile."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from imagefleet.http import connections
from imagefleet.telemetry import probes

HALF_A_HEADER = b"GET / HTTP/1.1\r\nHost: localhost\r\n"

ANSWER = b"x" * 2**24

Begin = Callable[[int, bytes], Awaitable[asyncio.StreamReader]]


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """Opens a connection to a port, and sends some bytes."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(port: int, data: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(data)
            await writer.drain()
            return reader

        yield open_one


@contextlib.asynccontextmanager
async def serving(answer: bytes = b"x") -> AsyncIterator[int]:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=answer)

    app = web.Application()
    app.router.add_get("/", handle)
    async with probes.listening(app, "127.0.0.1", 0, "the test") as port:
        yield port


async def get(port: int) -> bytes:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        return await response.read()


async def until_closed(reader: asyncio.StreamReader) -> int:
    """Reads to the end, however it comes; returns the number of bytes."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while data := await reader.read(2**16):
            count += len(data)
    return count


@pytest.fixture
def short(monkeypatch) -> None:
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)


async def test_half_a_header_is_closed_after_a_while(short: None, begin: Begin):
    async with serving() as port:
        assert await until_closed(await begin(port, HALF_A_HEADER)) == 0


async def test_an_answer_that_nobody_takes_is_closed_after_a_while(
    short: None, begin: Begin
):
    async with serving(ANSWER) as port:
        reader = await begin(port, HALF_A_HEADER + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        # It reads on when the server has long closed.
        assert await get_of_another(port) == b""

        assert await until_closed(reader) < len(ANSWER)


async def get_of_another(port: int) -> bytes:
    """What another connection gets that says nothing: its end, after the same time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def test_more_connections_than_there_may_be_keep_nobody_out(
    begin: Begin, monkeypatch
):
    monkeypatch.setattr(connections, "MOST", 10)
    async with serving() as port:
        silent = [await begin(port, HALF_A_HEADER) for _ in range(30)]

        assert await asyncio.gather(*(get(port) for _ in range(5))) == [b"x"] * 5

        assert await until_closed(silent[0]) == 0


async def test_a_thousand_at_once_are_all_answered():
    async with serving() as port:
        found = await asyncio.gather(*(get(port) for _ in range(1_000)))
    assert found == [b"x"] * 1_000


async def test_a_thousand_connections_at_once_leave_others_their_turn(monkeypatch):
    """However many there are, few are accepted in one turn of the event loop."""
    turns = 0
    accepted = [0]
    accept = connections.Connections.accept

    def counted(self: connections.Connections) -> asyncio.BaseProtocol:
        accepted[-1] += 1
        return accept(self)

    monkeypatch.setattr(connections.Connections, "accept", counted)
    async with serving() as port:
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        while sum(accepted) < len(opened):
            await asyncio.sleep(0)
            turns += 1
            accepted.append(0)
        for each in opened:
            each.close()

    assert max(accepted) <= connections.AT_ONCE

"""The HTTP port for monitoring: /metrics, and the probes /started, /live and /ready."""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp.web import Application, AppRunner, Request, Response
from prometheus_client import CollectorRegistry
from yarl import URL

from imagefleet.errors import SetupError
from imagefleet.http import connections
from imagefleet.telemetry import metrics

Check = Callable[[], bool]


@contextlib.asynccontextmanager
async def serving(
    registry: CollectorRegistry,
    *,
    is_live: Check,
    is_ready: Check,
    is_started: Check = lambda: True,
    host: str,
    port: int,
) -> AsyncIterator[int]:
    """Serves while the block runs; yields the port (with port 0, the system chooses it).

    Any answer shows that the event loop runs; *is_live* reports on the engine. Raises
    SetupError as `listening`.
    """

    async def scraped(_: Request) -> Response:
        body = metrics.render(registry)
        return Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})

    app = Application()
    app.router.add_get("/metrics", scraped)
    app.router.add_get(
        "/started",
        _probe(is_started, "started", "loading the model and checking the node"),
    )
    app.router.add_get("/live", _probe(is_live, "live", "the engine hangs"))
    app.router.add_get("/ready", _probe(is_ready, "ready", "starting or draining"))
    async with listening(app, host, port, "/metrics") as chosen:
        yield chosen


@contextlib.asynccontextmanager
async def listening(
    app: Application, host: str, port: int, what: str, **terms: Any
) -> AsyncIterator[int]:
    """Serves *app* by aiohttp's *terms*; yields the port, or raises SetupError if it is in use."""
    open_connections = connections.Connections()
    app.middlewares.insert(0, open_connections.count)
    runner = AppRunner(app, access_log=None, **terms)
    try:
        await runner.setup()
        open_connections.server = runner.server
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                open_connections.accept, host, port, backlog=connections.AT_ONCE
            )
        except OSError as error:
            raise SetupError(
                f"cannot listen on {authority(host, port)} for {what}: {error.strerror or error};"
                " choose another with --port"
            ) from None
        for listener in server.sockets:
            connections.keep_waiting(listener)
        with contextlib.closing(server), open_connections.sweeping():
            yield server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


def authority(host: str, port: int) -> str:
    """HOST:PORT as addresses have it, where IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(authority: str) -> bool:
    """True if HOST or HOST:PORT is one that only this machine reaches."""
    try:
        host = URL(f"//{authority}").host or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _probe(check: Check, yes: str, no: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        passed = check()
        return Response(
            text=(yes if passed else no) + "\n", status=200 if passed else 503
        )

    return answer

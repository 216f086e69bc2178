"""The HTTP port for monitoring: /metrics, and the probes /started, /live and /ready."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from imagefleet import errors


@contextlib.asynccontextmanager
async def serving(
    registry: CollectorRegistry,
    *,
    is_live: Callable[[], bool],
    is_ready: Callable[[], bool],
    is_started: Callable[[], bool] | None = None,
    host: str,
    port: int,
) -> AsyncIterator[int]:
    """Serves while the block runs; yields the port (with port 0, the system chooses it).

    Any answer shows that the event loop runs; *is_live* reports on the engine. A process that is
    up at once needs no *is_started*.

    Raises:
        SetupError: the port is in use or not permitted.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def live(_: web.Request) -> web.Response:
        return _answer(is_live(), "live", "the engine hangs")

    async def ready(_: web.Request) -> web.Response:
        return _answer(is_ready(), "ready", "starting or draining")

    async def started(_: web.Request) -> web.Response:
        is_up = is_started is None or is_started()
        return _answer(is_up, "started", "loading the model and checking the node")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/started", started)
    app.router.add_get("/live", live)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise errors.SetupError(
                f"cannot listen on {host}:{port} for /metrics: {error.strerror or error}; choose"
                " another with --port"
            ) from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _answer(passed: bool, yes: str, no: str) -> web.Response:
    return web.Response(text=(yes if passed else no) + "\n", status=200 if passed else 503)

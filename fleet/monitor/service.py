"""A long-running service: it serves and pushes its metrics until SIGTERM or Ctrl-C."""

from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from cli import console
from fleet.settings import ServiceSettings
from imagefleet.telemetry import probes, push
from imagefleet.telemetry.logs import log


async def run(
    work: Callable[[], Coroutine[Any, Any, None]],
    registry: CollectorRegistry,
    settings: ServiceSettings,
    *,
    name: str,
    doing: str,
    is_ready: Callable[[], bool] = lambda: True,
) -> None:
    """Does *work*, logged as *doing*; *name* is its metrics' job. SetupError if it gets no port."""
    async with (
        probes.serving(
            registry,
            is_live=lambda: True,
            is_ready=is_ready,
            host=settings.host,
            port=settings.port,
        ) as port,
        push.pushing(registry, settings, job=name),
    ):
        log.info(
            f"{doing}; metrics at http://{probes.authority(settings.host, port)}/metrics",
            action="start",
            port=port,
        )
        await console.until_stopped(work())

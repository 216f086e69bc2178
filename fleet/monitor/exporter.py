"""`imagefleet exporter`: one process that tells what the workers cannot: how the queues move."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from fleet import console, options
from fleet.monitor import prometheus
from fleet.settings import ExporterSettings
from imagefleet.storage.open import open_storage
from imagefleet.telemetry import logs

log = logging.getLogger(__name__)


@options.from_settings(ExporterSettings)
def command(settings: ExporterSettings) -> None:
    """Exports queue depths, ages, and time and dollars to empty.

    One is enough for a fleet. It serves /metrics on port 9108 unless told otherwise, or pushes
    with --push-url; with --prometheus it knows the rate of completions from the workers' own
    metrics instead of from the queue's depth alone.

    imagefleet exporter --prometheus http://localhost:9090
    """
    logs.configure(settings.log_format)
    console.run(_serve(settings))


async def _serve(settings: ExporterSettings) -> None:
    from fleet.monitor.queue_flow import Exporter
    from imagefleet.telemetry import probes, push

    async with contextlib.AsyncExitStack() as stack:
        storage = await stack.enter_async_context(open_storage(settings))
        await storage.check()
        server = None
        if settings.prometheus is not None:
            server = await stack.enter_async_context(prometheus.connected(settings.prometheus))
        exporter = Exporter(storage, settings, server)
        port = await stack.enter_async_context(
            probes.serving(
                exporter.registry,
                is_live=lambda: True,
                is_ready=lambda: exporter.flows.looked_at is not None,
                host=settings.host,
                port=settings.port,
            )
        )
        await stack.enter_async_context(
            push.pushing(exporter.registry, settings, job="imagefleet-exporter")
        )
        log.info(
            "watching %s of %s, metrics at http://%s:%d/metrics",
            storage.queue.name,
            storage.url,
            settings.host,
            port,
            extra={"action": "start", "port": port},
        )
        await _until_told(asyncio.create_task(exporter.run(), name="look"))


async def _until_told(looking: asyncio.Task[None]) -> None:
    """Ends with SIGTERM or Ctrl-C; raises what *looking* raised."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, looking.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await looking

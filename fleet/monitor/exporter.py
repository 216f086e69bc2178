"""`imagefleet exporter`: one process per fleet that exports the state of its queues."""

from __future__ import annotations

import asyncio
import logging

from fleet import console, options
from fleet.monitor import prometheus
from fleet.monitor.settings import ExporterSettings
from imagefleet.telemetry import logs

log = logging.getLogger(__name__)


@options.from_settings(ExporterSettings)
def command(settings: ExporterSettings) -> None:
    """Exports queue depths, and the time and cost to empty the queue.

    A fleet needs one. It serves /metrics on --port and pushes them to --push-url if given. With
    --prometheus it takes the completion rate from the workers' metrics instead of deriving it
    from the queue depth.

    imagefleet exporter --prometheus http://localhost:9090
    """
    logs.configure(settings.log_format)
    console.run(_serve(settings))


async def _serve(settings: ExporterSettings) -> None:
    from fleet.monitor.queue_flow import Exporter
    from imagefleet.telemetry import probes, push

    async with (
        console.connected(settings) as client,
        prometheus.connected_if(settings.prometheus) as server,
    ):
        storage = client.storage
        exporter = Exporter(storage, settings, server)
        async with (
            probes.serving(
                exporter.registry,
                is_live=lambda: True,
                is_ready=lambda: exporter.has_sampled,
                host=settings.host,
                port=settings.port,
            ) as port,
            push.pushing(exporter.registry, settings, job="imagefleet-exporter"),
        ):
            log.info(
                "sampling %s of %s; metrics at http://%s:%d/metrics",
                storage.queue.name,
                storage.url,
                settings.host,
                port,
                extra={"action": "start", "port": port},
            )
            await console.until_stopped(asyncio.create_task(exporter.run(), name="exporter"))

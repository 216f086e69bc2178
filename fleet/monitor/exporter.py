"""`imagefleet exporter`: the depths of a fleet's queues as metrics."""

import asyncio

from prometheus_client import Counter, Gauge

from cli import console, options
from fleet.monitor import service
from fleet.settings import ExporterSettings
from imagefleet import concurrency
from imagefleet.errors import TransientError
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import JobQueue
from imagefleet.telemetry import logs, metrics
from imagefleet.telemetry.logs import log


@options.flat
async def command(settings: ExporterSettings) -> None:
    """Exports queue depths.

    A fleet needs one. It serves /metrics on --port and pushes them to --push-url if given. The
    dashboards make of them when the queue is empty, and at which cost.

    imagefleet exporter --push-url http://localhost:8428/api/v1/import/prometheus
    """
    logs.configure(settings.log_format)
    async with console.connected(settings) as client:
        storage = client.storage
        exporter = Exporter(storage, settings)
        await service.run(
            exporter.run,
            exporter.registry,
            settings,
            name="imagefleet-exporter",
            doing=f"sampling {storage.queue.name} of {storage.url}",
            is_ready=lambda: exporter.has_sampled,
        )


class Exporter:
    """Samples the queues of one storage."""

    def __init__(self, storage: Storage, settings: ExporterSettings) -> None:
        self.registry = metrics.LabelledRegistry({"fleet": settings.fleet_name})
        self.has_sampled = False
        self._failed_samples = Counter(
            "imagefleet_exporter_failed_looks",
            "Samples of the queues that failed.",
            registry=self.registry,
        )
        self._sampled_at = Gauge(
            "imagefleet_exporter_last_look_timestamp_seconds",
            "Time of the last sample of the queues, or of the start.",
            registry=self.registry,
        )
        self._sampled_at.set_to_current_time()
        if settings.dollars_per_hour is not None:
            Gauge(
                "imagefleet_confirmed_dollars_per_hour",
                "Price of the whole fleet that was confirmed.",
                registry=self.registry,
            ).set(settings.dollars_per_hour)
        self._gauges = metrics.QueueGauges(self.registry)
        self._storage = storage
        self._seconds = settings.sample_seconds

    async def run(self) -> None:
        """Samples forever; an outage is logged."""
        while True:
            try:
                await self.sample()
            except TransientError as error:
                self._failed_samples.inc()
                log.warning(f"trying again: {error}", action="look_failed")
            await asyncio.sleep(self._seconds)

    async def sample(self) -> None:
        """Samples both queues; raises TransientError if the storage fails."""
        await concurrency.gather(
            self._sample(self._storage.queue), self._sample(self._storage.poison)
        )
        self._sampled_at.set_to_current_time()
        self.has_sampled = True

    async def _sample(self, queue: JobQueue) -> None:
        self._gauges.update(queue.name, await queue.depth())

"""`imagefleet exporter`: the rates of a job queue, and the time and cost to empty it."""

import asyncio
import time
from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cli import console, options
from fleet.monitor import prometheus, rates, service
from fleet.settings import ExporterSettings
from imagefleet import concurrency, errors
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import JobQueue
from imagefleet.telemetry import logs, metrics
from imagefleet.telemetry.metrics import QueueFlow, QueueGauges

log = logs.EventLog(__name__)

_GAUGES = {
    "imagefleet_exporter_arrivals_per_second": (
        "Jobs added to the queue; without the workers' metrics, a lower bound."
    ),
    "imagefleet_exporter_completions_per_second": (
        "Jobs completed or failed; without the workers' metrics, a lower bound."
    ),
    "imagefleet_queue_seconds_to_empty": "Time until the queue is empty at its current rate.",
    "imagefleet_queue_dollars_to_empty": "Cost of the fleet until the queue is empty.",
    "imagefleet_confirmed_dollars_per_hour": "Price of the whole fleet that was confirmed.",
    "imagefleet_exporter_last_look_timestamp_seconds": "Time of the last sample of the queues.",
}


@options.flat
async def command(settings: ExporterSettings) -> None:
    """Exports queue depths, and the time and cost to empty them.

    A fleet needs one. It serves /metrics on --port and pushes them to --push-url if given. With
    --prometheus it takes the completion rate from the workers' metrics instead of deriving it from
    the queue depth.

    imagefleet exporter --prometheus http://localhost:9090
    """
    logs.configure(settings.log_format)
    async with (
        console.connected(settings) as client,
        prometheus.connected_if(settings.prometheus, settings.queried_fleet) as server,
    ):
        storage = client.storage
        exporter = Exporter(storage, settings, server)
        await service.run(
            exporter.run,
            exporter.registry,
            settings,
            name="imagefleet-exporter",
            doing=f"sampling {storage.queue.name} of {storage.url}",
            is_ready=lambda: bool(exporter.figures),
        )


def queue_figures(
    flow: QueueFlow, fleet: rates.FleetRates | None, price: float | None
) -> dict[str, float]:
    """The exporter's gauges as far as they are known; *price*: $/h, in place of the metrics'."""
    net, seconds = flow.net_per_second, flow.seconds_to_empty
    completions = fleet.jobs_per_second if fleet else None
    if price is None and fleet is not None:
        price = fleet.dollars_per_hour
    known = {}
    if net is not None:
        completions = max(0.0, -net) if completions is None else completions
        known["imagefleet_exporter_arrivals_per_second"] = max(0.0, net + completions)
    if completions is not None:
        known["imagefleet_exporter_completions_per_second"] = completions
    if seconds is not None:
        known["imagefleet_queue_seconds_to_empty"] = seconds
        if price is not None:
            known["imagefleet_queue_dollars_to_empty"] = seconds / 3600 * price
    return known


class Exporter(Collector):
    """Samples the queues of one storage and, with a *server*, the workers' metrics."""

    def __init__(
        self,
        storage: Storage,
        settings: ExporterSettings,
        server: prometheus.Prometheus | None,
    ) -> None:
        self.registry = metrics.LabelledRegistry({"fleet": settings.fleet_name})
        self._failed_samples = Counter(
            "imagefleet_exporter_failed_looks",
            "Samples of the queues or queries of the metrics that failed.",
            registry=self.registry,
        )
        self._gauges = QueueGauges(self.registry)
        self._storage = storage
        self._settings = settings
        self._server = server
        self._flow = QueueFlow()
        self.figures: dict[str, float] = {}
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, value in self.figures.items():
            yield GaugeMetricFamily(name, _GAUGES[name], value=value)

    async def run(self) -> None:
        """Samples forever; an outage is logged."""
        while True:
            try:
                await self.sample()
            except errors.TransientError as error:
                self._failed_samples.inc()
                log.warning(f"trying again: {error}", action="look_failed")
            await asyncio.sleep(self._settings.sample_seconds)

    async def sample(self) -> None:
        """Samples both queues; raises TransientError if the storage, not if the metrics, fail."""
        depth, _ = await concurrency.gather(
            self._depth(self._storage.queue), self._depth(self._storage.poison)
        )
        self._flow.add_sample(time.monotonic(), depth)
        fleet = await rates.ask(self._server, rates.fleet_rates)
        if fleet is None and self._settings.prometheus:
            self._failed_samples.inc()
        confirmed = self._settings.dollars_per_hour
        self.figures = {
            **(
                {}
                if confirmed is None
                else {"imagefleet_confirmed_dollars_per_hour": confirmed}
            ),
            **queue_figures(self._flow, fleet, confirmed),
            "imagefleet_exporter_last_look_timestamp_seconds": time.time(),
        }

    async def _depth(self, queue: JobQueue) -> int:
        depth = await queue.depth()
        self._gauges.update(queue.name, depth)
        return depth.messages

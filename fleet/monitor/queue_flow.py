"""How a job queue moves, and what that means for a fleet's time and money."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleet.monitor import prometheus, rates
from fleet.settings import ExporterSettings
from imagefleet import errors
from imagefleet.storage.protocol import JobQueue, Storage
from imagefleet.telemetry.queue_gauges import QueueGauges

log = logging.getLogger(__name__)

#: Long enough that Azure's approximate counts even out, short enough to show a change.
WINDOW_SECONDS = 300.0

_SECONDS_PER_HOUR = 3600


class QueueFlow:
    """How fast a queue's messages become more or fewer, over the last minutes."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, at: float, messages: int) -> None:
        """*at* in monotonic seconds."""
        self._looks.append((at, messages))
        while len(self._looks) > 1 and at - self._looks[1][0] >= self._window_seconds:
            self._looks.popleft()

    @property
    def net_per_second(self) -> float | None:
        """Arrivals less completions; None before the second look."""
        (first_at, first), (last_at, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    @property
    def seconds_to_empty(self) -> float | None:
        """As it moves now: 0 when it is empty, infinite while it does not become fewer."""
        messages, net = self._looks[-1][1], self.net_per_second
        if messages == 0:
            return 0.0
        if net is None:
            return None
        return messages / -net if net < 0 else math.inf


class FlowCollector(Collector):
    """What is derived from looks at the job queue; a figure that is not known is left out."""

    def __init__(self) -> None:
        self.failed_looks = 0
        self.looked_at: float | None = None
        self._figures: dict[str, tuple[str, float | None]] = {}

    def tell(self, flow: QueueFlow, fleet: rates.FleetRates | None, price: float | None) -> None:
        """*price*: dollars per hour of the whole fleet, where it is not the metrics'."""
        net, seconds = flow.net_per_second, flow.seconds_to_empty
        completions = fleet.jobs_per_second if fleet else None
        if completions is None and net is not None:
            completions = max(0.0, -net)
        arrivals = None if net is None else max(0.0, net + (completions or 0))
        if price is None and fleet is not None:
            price = fleet.dollars_per_hour
        dollars = None
        if seconds is not None and price is not None:
            dollars = seconds / _SECONDS_PER_HOUR * price if seconds else 0.0
        self._figures = {
            "imagefleet_exporter_arrivals_per_second": (
                "Jobs that come in; without the workers' metrics, at least as many.",
                arrivals,
            ),
            "imagefleet_exporter_completions_per_second": (
                "Jobs that end; without the workers' metrics, at least as many.",
                completions,
            ),
            "imagefleet_queue_seconds_to_empty": (
                "Until the job queue is empty, as it moves now.",
                seconds,
            ),
            "imagefleet_queue_dollars_to_empty": (
                "What the fleet costs until then.",
                dollars,
            ),
        }
        self.looked_at = time.time()

    def collect(self) -> Iterator[Metric]:
        for name, (words, value) in self._figures.items():
            if value is not None:
                yield GaugeMetricFamily(name, words, value=value)
        if self.looked_at is not None:
            yield GaugeMetricFamily(
                "imagefleet_exporter_last_look_timestamp_seconds",
                "When the queues last answered.",
                value=self.looked_at,
            )
        yield CounterMetricFamily(
            "imagefleet_exporter_failed_looks",
            "Looks at the queues or the metrics that were not answered.",
            value=self.failed_looks,
        )


class Exporter:
    """Looks at the queues of one home, and at the workers' metrics where there are any."""

    def __init__(
        self, storage: Storage, settings: ExporterSettings, server: prometheus.Prometheus | None
    ) -> None:
        self.registry = CollectorRegistry()
        self.flows = FlowCollector()
        self.registry.register(self.flows)
        self._gauges = QueueGauges(self.registry)
        self._storage = storage
        self._settings = settings
        self._server = server
        self._flow = QueueFlow()

    async def run(self) -> None:
        """Looks for ever; an outage is logged and outlived."""
        while True:
            try:
                await self.look()
            except errors.TransientError as error:
                self.flows.failed_looks += 1
                log.warning("looking again: %s", error, extra={"action": "look_failed"})
            await asyncio.sleep(self._settings.look_seconds)

    async def look(self) -> None:
        """One look at both queues.

        Raises:
            TransientError: the storage does not answer. That the metrics do not is logged.
        """
        messages, _ = await asyncio.gather(
            self._depth(self._storage.queue), self._depth(self._storage.poison)
        )
        self._flow.look(time.monotonic(), messages)
        fleet = None
        if self._server is not None:
            try:
                fleet = await rates.fleet_rates(self._server)
            except errors.FleetError as error:
                self.flows.failed_looks += 1
                log.warning("without the metrics: %s", error, extra={"action": "metrics_unknown"})
        self.flows.tell(self._flow, fleet, self._settings.fleet_dollars_per_hour)

    async def _depth(self, queue: JobQueue) -> int:
        depth = await queue.depth()
        self._gauges.update(queue.name, depth)
        return depth.messages

"""What a worker tells Prometheus; the names are those of the design."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.gpu import GpuLane
from worker.loras import LoraLibrary

#: From a local SQLite call to a slow batch on a small card, doubling.
STAGE_SECONDS_BUCKETS = tuple(0.001 * 2**power for power in range(17))


class WorkerMetrics:
    """The counters that the stages count up; one registry a worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.images = Counter("imagefleet_images", "Images stored.", registry=self.registry)
        self.jobs = Counter(
            "imagefleet_jobs", "Jobs by what became of them.", ["outcome"], registry=self.registry
        )
        self.stage_seconds = Histogram(
            "imagefleet_stage_seconds",
            "Time that a job or an image spends in each stage.",
            ["stage"],
            buckets=STAGE_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.lease_renewals = Counter(
            "imagefleet_lease_renewals",
            "Renewals of leases by their result.",
            ["result"],
            registry=self.registry,
        )
        self.queue_messages = Gauge(
            "imagefleet_queue_messages",
            "Messages in a queue, leased ones included.",
            ["queue"],
            registry=self.registry,
        )


class EngineCollector(Collector):
    """Reads the engine's clock, its slots, the LoRA look-ups and the money at each scrape."""

    def __init__(self, lane: GpuLane, library: LoraLibrary, price_per_hour: float) -> None:
        self._lane = lane
        self._library = library
        self._price_per_hour = price_per_hour
        self._started_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        clock = self._lane.clock
        yield CounterMetricFamily(
            "imagefleet_gpu_busy_seconds", "Time the engine worked.", value=clock.busy_seconds
        )
        idle = CounterMetricFamily(
            "imagefleet_gpu_idle_seconds", "Time the engine waited, by reason.", labels=["reason"]
        )
        for reason, seconds in sorted(clock.idle_seconds.copy().items()):
            idle.add_metric([reason], seconds)
        yield idle
        if clock.first_image_seconds is not None:
            yield GaugeMetricFamily(
                "imagefleet_first_image_seconds",
                "Time from the worker's start to its first image, compiling included.",
                value=clock.first_image_seconds,
            )
        yield CounterMetricFamily(
            "imagefleet_engine_recompiles",
            "Compilations after the warm-up; more than 0 is a fault of the engine.",
            value=self._lane.recompiles(),
        )
        slots = GaugeMetricFamily(
            "imagefleet_slots", "Places of the engine's batch by state.", labels=["state"]
        )
        slots.add_metric(["busy"], self._lane.in_engine)
        slots.add_metric(["free"], max(0, self._lane.capacity - self._lane.in_engine))
        yield slots
        lookups = CounterMetricFamily(
            "imagefleet_lora_cache",
            "Look-ups of LoRA files, on disk and in memory.",
            labels=["cache", "result"],
        )
        for cache, counts in (
            ("disk", self._library.lookups),
            ("memory", self._lane.lora_lookups),
        ):
            for result in ("hit", "miss"):
                lookups.add_metric([cache, result], counts.get(result, 0))
        yield lookups
        hours = (time.monotonic() - self._started_at) / 3600
        yield CounterMetricFamily(
            "imagefleet_cost_dollars",
            "Time this replica has been up times its price.",
            value=hours * self._price_per_hour,
        )

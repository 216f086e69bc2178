"""A worker's Prometheus metrics: what it counts, its engine's clock, its cost, its queues' depth.

A replica is billed while it runs: loading the model, waiting and draining included. Start-up, idle
and busy time add up to the GPU's cost; the time of failed and duplicate images is part of the busy
time.
"""

import asyncio
import contextlib
import time
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn, get_args

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from imagefleet import concurrency, errors
from imagefleet.errors import FleetError, JobError, TransientError
from imagefleet.files import kernels
from imagefleet.storage.protocol import Clock, JobQueue, Operations
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.telemetry import metrics
from imagefleet.telemetry.logs import log
from imagefleet.telemetry.metrics import QueueGauges
from worker.files.library import FileLibrary
from worker.gpu_thread import EngineThread
from worker.replica import Replica

#: A job's end in this worker; `verified` and `unverified`: a second drawing is stored, or none is;
#: `moved`: to the queue of its model.
Outcome = Literal[
    "completed",
    "duplicate",
    "verified",
    "unverified",
    "retried",
    "failed",
    "cancelled",
    "dropped",
    "lost",
    "handed_back",
    "moved",
]

Stage = Literal[
    "pull",
    "prepare",
    "wait_gpu",
    "generate",
    "encode",
    "upload",
    "record",
    "acknowledge",
]

#: Buckets in seconds, doubling from a local SQLite call to a slow batch on a small card, doubling.
STAGE_SECONDS_BUCKETS = tuple(0.001 * 2**power for power in range(17))

#: Why an engine is idle: no jobs, jobs that arrive too slowly, uploads that are too slow, or that
#: another model is being loaded.
IDLE_REASONS = ("queue_empty", "starved", "backpressure", "switch")

#: A fault of a node; `engine`: loading the model or the first images failed.
NodeFault = Literal[
    "gpu_memory",
    "engine",
    "start_up_time",
    "speed",
    "failed_images",
    "weights",
    "quarantined",
]

#: Fate of an image that the GPU generated and that is not stored as the job's by this worker.
LostImage = Literal["failed", "duplicate", "second_drawing", "dropped"]

#: Seconds between two measurements. Every worker measures, so the metrics are fresher the larger
#: the fleet; more often would only be billed.
DEPTH_SECONDS = 60.0

#: What the last measurement may take: a storage that is away must not delay the exit.
LAST_DEPTH_SECONDS = 5.0


class WorkerMetrics:
    """The metrics that the stages update, and one registry per worker."""

    def __init__(self, fleet: str | None = None, device: str | None = None) -> None:
        """Labels of every series, if given; *device* is one of several GPUs of this machine."""
        labels = {"fleet": fleet, "device": device}
        #: Jobs by outcome, and the images stored, since the worker's start.
        self.outcomes: Counted[str] = Counted()
        self.images_stored = 0
        self.registry = metrics.LabelledRegistry(
            {name: value for name, value in labels.items() if value}
        )

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"imagefleet_{name}", what, labels, registry=self.registry)

        self.images = counter("images", "Images stored.")
        self.dropped_images = counter(
            "dropped_images", "Images that were judged and not stored."
        )
        self.jobs = counter("jobs", "Jobs by outcome.", "outcome")
        self.model_images = counter("model_images", "Images stored.", "model")
        self.campaign_images = counter(
            "campaign_images", "Images stored, by campaign.", "campaign"
        )
        #: Campaigns with a series of their own; bounded, as whoever sends jobs names campaigns.
        self.campaigns: set[str] = set()
        self.chain_images = counter(
            "chain_images", "Images stored of jobs with several stages.", "stage"
        )
        self.model_jobs = counter(
            "model_jobs", "Jobs by outcome and model.", "model", "outcome"
        )
        self.model_switches = counter(
            "model_switches", "Changes to a model from another.", "model"
        )
        self.model_switch_seconds = counter(
            "model_switch_seconds", "Time without an engine during changes of models."
        )
        stage_seconds = Histogram(
            "imagefleet_stage_seconds",
            "Time of a job or an image in each stage.",
            ["stage"],
            buckets=STAGE_SECONDS_BUCKETS,
            registry=self.registry,
        )
        #: Series by stage; each job is observed in all of them, and to find a series takes as long.
        self.stage_seconds: Mapping[Stage, Histogram] = {
            stage: stage_seconds.labels(stage) for stage in get_args(Stage)
        }
        self.lease_renewals = counter(
            "lease_renewals", "Lease renewals by result.", "result"
        )
        self.failed_jobs = counter(
            "failed_jobs", "Jobs sent to the poison queue, by class of error.", "error"
        )
        self.node_windows = counter(
            "node_watch_windows", "Windows of the node watchdog by result.", "result"
        )
        self.reallocations = counter(
            "node_reallocations", "Requests for another node, by result.", "result"
        )
        self.node_faults = counter(
            "node_faults",
            "Faults of this node, found by its checks at the start and while it works.",
            "fault",
        )
        self.node_check_passed = Gauge(
            "imagefleet_node_check_passed",
            "0 if this node failed its check before the first job, else 1.",
            registry=self.registry,
        )
        self.node_check_passed.set(1)
        self.suspect_images = counter(
            "suspect_images",
            "Images drawn by this node between its last good check and one that failed.",
        )
        self.waiting = Gauge(
            "imagefleet_waiting_for_operator",
            "1 while this worker waits for storage, a queue or credentials to be fixed.",
            registry=self.registry,
        )
        self.draining = Gauge(
            "imagefleet_draining",
            "1 once this worker ends in order: it pulls no more.",
            registry=self.registry,
        )
        self._worker: Info | None = None
        self.queues = QueueGauges(self.registry)
        self._collectors: tuple[Collector, ...] = ()
        self._start_at_zero()

    def set_worker_info(self, **labels: str) -> None:
        """Labels of this worker, in one series that the others are joined with."""
        if self._worker is None:
            self._worker = Info(
                "imagefleet_worker", "This worker, always 1.", registry=self.registry
            )
        self._worker.info(labels)

    def serve(self, models: Iterable[str]) -> None:
        """Creates the series of models before their first event."""
        for model in models:
            self.model_images.labels(model)
            self.model_switches.labels(model)
            for outcome in ("completed", "failed"):
                self.model_jobs.labels(model, outcome)

    def collect_from(self, *collectors: Collector) -> None:
        """Registers a pipeline's collectors in place of those of the previous one."""
        for collector in self._collectors:
            self.registry.unregister(collector)
        for collector in collectors:
            self.registry.register(collector)
        self._collectors = collectors

    def _start_at_zero(self) -> None:
        """Creates each series before its first event: `increase` misses a first value of 1."""
        for metric, values in (
            (self.jobs, get_args(Outcome)),
            (self.lease_renewals, ("renewed", "unknown", "lost")),
            (self.node_windows, ("passed", "failed", "unknown")),
            (self.reallocations, ("granted", "refused")),
            (self.node_faults, get_args(NodeFault)),
        ):
            for value in values:
                metric.labels(value)
        for name, each in vars(errors).items():  # that end in the poison queue
            if isinstance(each, type) and issubclass(each, JobError | TransientError):
                self.failed_jobs.labels(name)


@dataclass(eq=False)
class EngineCollector(Collector):
    """The engine's clock, its slots and the LoRA caches' hits, read at each scrape."""

    _engine_thread: EngineThread
    _library: FileLibrary

    def collect(self) -> Iterator[Metric]:
        clock = self._engine_thread.clock
        engine = self._engine_thread.engine
        busy_seconds = clock.busy_seconds
        waited = dict.fromkeys(IDLE_REASONS, 0.0) | clock.idle_seconds.copy()
        yield _counter("gpu_busy_seconds", "Time the engine was busy.", busy_seconds)
        yield _counter(
            "gpu_idle_seconds",
            "Time the engine was idle, by reason.",
            dict(sorted(waited.items())),
            "reason",
        )
        graphs: Mapping[str, int] = getattr(engine, "graphs", {})
        yield _counter(
            "engine_graphs",
            "Graphs that run compiled, by where their kernels are from.",
            {origin: graphs.get(origin, 0) for origin in kernels.ORIGINS},
            "origin",
        )
        yield _counter(
            "unet_rows",
            "Rows of the UNet's calls that images took: two a call with guidance, one without.",
            getattr(engine, "unet_rows", 0),
        )
        yield _counter(
            "unet_rows_saved",
            "Rows that were left to images which were dropped for their estimates.",
            getattr(engine, "unet_rows_saved", 0),
        )
        yield _gauge(
            "engine_compiling",
            "1 while the engine compiles: it draws meanwhile, but more slowly.",
            getattr(engine, "is_compiling", False),
        )
        busy = self._engine_thread.in_engine
        slots = {"busy": busy, "free": max(0, self._engine_thread.capacity - busy)}
        yield _gauge("slots", "Slots of the engine by state.", slots, "state")
        in_memory = engine.lora_lookups if engine else {}
        lookups = {}
        for cache, counts in (("disk", self._library.lookups), ("memory", in_memory)):
            for result in ("hit", "miss"):
                lookups[cache, result] = counts.get(result, 0)
        yield _counter(
            "lora_cache",
            "LoRA cache lookups, on disk and in memory.",
            lookups,
            "cache",
            "result",
        )


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    what: str,
    value: float | Mapping[Any, float],
    *labels: str,
) -> Metric:
    """A metric with one series, or with those of each *value* of its labels."""
    if not isinstance(value, Mapping):
        return kind(f"imagefleet_{name}", what, value=value)
    family = kind(f"imagefleet_{name}", what, labels=labels)
    for each, number in value.items():
        family.add_metric([each] if isinstance(each, str) else each, number)
    return family


_counter = partial(_family, CounterMetricFamily)
_gauge = partial(_family, GaugeMetricFamily)


@dataclass(eq=False)
class CostMeter(Collector):
    """One replica's cost, computed at each scrape; the GPU's only where its price is known."""

    _engine_thread: EngineThread
    _replica: Replica
    _operations: Operations
    _clock: Clock

    def __post_init__(self) -> None:
        replica = self._replica
        self._began_at = self._engine_thread.clock.began_at
        #: This replica's part of each image's metadata, in ASCII (`fleet.report.records`).
        self.record = {"gpu": replica.gpu.encode("ascii", "replace").decode()}
        if replica.dollars_per_hour is not None:
            self.record["price_per_hour"] = f"{replica.dollars_per_hour:g}"
        self._ready_at: float | None = None
        self._idle_seconds = 0.0
        self._lost_seconds: dict[str, float] = dict.fromkeys(get_args(LostImage), 0.0)

    @property
    def gpu_dollars(self) -> float | None:
        """Dollars for the GPU from the start until now; None where the price is unknown."""
        return self._dollars(time.monotonic() - self._began_at)

    @property
    def dollars(self) -> float | None:
        """Dollars so far, all in; None where the price is unknown."""
        gpu_dollars = self.gpu_dollars
        return None if gpu_dollars is None else gpu_dollars + self.storage_dollars

    @property
    def storage_dollars(self) -> float:
        """Dollars for the storage's operations so far; keeping images is billed by the month."""
        return self._replica.storage_prices.dollars(self._operations)

    def ready(self) -> None:
        """The start-up is over: the engine is loaded."""
        self._ready_at = time.monotonic()
        start_up_seconds = self._ready_at - self._began_at
        self.record["start_up_seconds"] = f"{start_up_seconds:.3f}"
        # Not before the storage has told its time.
        started_at = self._clock.now() - timedelta(seconds=start_up_seconds)
        self.record["started_at"] = started_at.isoformat(timespec="milliseconds")

    def lost(self, reason: LostImage) -> None:
        """A generated image is no job's: counts the mean time of one."""
        clock = self._engine_thread.clock
        if clock.images:
            self._lost_seconds[reason] += clock.busy_seconds / clock.images

    def wasted_seconds(self) -> dict[str, float]:
        now = time.monotonic()
        ready_at = now if self._ready_at is None else self._ready_at
        clock = self._engine_thread.clock
        tick_began_at = self._engine_thread.tick_began_at
        in_tick = 0.0 if tick_began_at is None else now - tick_began_at
        # The engine's thread writes both while this reads them. Prometheus takes a counter that
        # decreases, even by one tick, for a reset and adds its whole value again.
        self._idle_seconds = max(
            self._idle_seconds, now - ready_at - clock.busy_seconds - in_tick
        )
        return {
            "start_up": ready_at - self._began_at,
            "idle": self._idle_seconds,
            **self._lost_seconds,
        }

    def collect(self) -> Iterator[Metric]:
        cost = {"storage": self.storage_dollars}
        if (gpu_dollars := self.gpu_dollars) is not None:
            cost["gpu"] = gpu_dollars
            seconds = self.wasted_seconds()
            wasted = {each: self._dollars(seconds[each]) or 0.0 for each in seconds}
            yield _counter(
                "wasted_dollars",
                "GPU cost without a stored image, by reason.",
                wasted,
                "reason",
            )
            price = self._replica.dollars_per_hour
            yield _gauge(
                "price_dollars_per_hour", "Price of this replica.", price or 0.0
            )
        yield _counter(
            "cost_dollars",
            "Cost of this replica: its running time and its storage operations.",
            cost,
            "kind",
        )
        done = self._operations
        by_kind = {
            "queue": done.queue,
            "blob_write": done.blob_writes,
            "blob_read": done.blob_reads,
        }
        yield _counter(
            "storage_operations", "Billed storage operations by kind.", by_kind, "kind"
        )
        yield _gauge(
            "clock_offset_seconds",
            "How far the clock of this worker's machine is ahead of the storage's.",
            self._clock.offset_seconds,
        )
        clock = self._engine_thread.clock
        for name, until, at in (
            ("start_up", "until its engine was loaded", self._ready_at),
            ("first_image", "to a job's first image", clock.first_image_at),
            ("full_speed", "to a job's first at full speed", clock.full_speed_at),
        ):
            if at is not None:
                yield _gauge(
                    f"{name}_seconds",
                    f"Time from this worker's start {until}.",
                    at - self._began_at,
                )
        if clock.warm_up_speed is not None:
            yield _gauge(
                "warm_up_speed_ratio",
                "Speed between a job's first image and the first at full speed, as a share of it.",
                clock.warm_up_speed,
            )

    def _dollars(self, seconds: float) -> float | None:
        price = self._replica.dollars_per_hour
        return None if price is None else seconds / 3600 * price


@dataclass(eq=False)
class DepthMeter:
    """Measures the depth of the job queue and of the poison queue."""

    _jobs: RoutedQueue
    _poison: JobQueue
    _metrics: WorkerMetrics
    #: Called with the messages in the job queue.
    _on_depth: Callable[[int], None]

    def __post_init__(self) -> None:
        self._unmeasured: set[str] = set()

    async def run(self) -> NoReturn:
        """Side task: measures both queues now and then."""
        while True:
            await self.measure()
            await asyncio.sleep(concurrency.jitter(DEPTH_SECONDS, high=1.5))

    async def measure_last(self) -> None:
        """Measures for the last push, which says what is left; gives up after a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_DEPTH_SECONDS):
                await self.measure()

    async def measure(self) -> None:
        for queue in (self._jobs, self._poison):
            try:
                depth = await queue.depth()
            except FleetError as error:
                # A worker's token may not allow it, and no job depends on it.
                if queue.name not in self._unmeasured:
                    self._unmeasured.add(queue.name)
                    log.info(
                        f"the depth of {queue.name} is not measured: {error}",
                        action="depth_unknown",
                    )
            else:
                self._metrics.queues.update(queue.name, depth)
                if queue is self._jobs:
                    self._on_depth(depth.messages)

"""A worker's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from imagefleet import errors
from imagefleet.telemetry import metrics
from imagefleet.telemetry.metrics import QueueGauges
from worker.files.kernels.cache import Origin
from worker.files.library import FileLibrary
from worker.gpu_thread import EngineThread

Outcome = Literal[
    "completed",
    "duplicate",
    "verified",
    "unverified",
    "retried",
    "failed",
    "cancelled",
    "lost",
    "handed_back",
    "moved",
]
"""How a job ended here; `verified` and `unverified`: a second drawing is stored, or none is;
`moved`: to the queue of its model."""

Stage = Literal[
    "pull", "prepare", "wait_gpu", "generate", "encode", "upload", "record", "acknowledge"
]

#: Buckets in seconds, doubling from a local SQLite call to a slow batch on a small card, doubling.
STAGE_SECONDS_BUCKETS = tuple(0.001 * 2**power for power in range(17))

#: Why an engine is idle: no jobs, jobs that arrive too slowly, uploads that are too slow, or that
#: another model is being loaded.
IDLE_REASONS = ("queue_empty", "starved", "backpressure", "switch")

NodeFault = Literal[
    "disk",
    "gpu_memory",
    "engine",
    "start_up_time",
    "gpu_speed",
    "upload_speed",
    "failed_images",
    "wrong_images",
    "weights",
    "quarantined",
]
"""What is wrong with a node; `engine`: loading the model or the first images failed."""

#: The errors that send a job to the poison queue.
FAILURES: tuple[type[errors.FleetError], ...] = (
    errors.JobError,
    errors.InvalidMessageError,
    errors.UntrustedJobError,
    errors.MissingFileError,
    errors.UnusableFileError,
    errors.TransientError,
)


class WorkerMetrics:
    """The metrics that the stages update, and one registry per worker."""

    def __init__(self, fleet: str | None = None, device: str | None = None) -> None:
        """Labels of every series, if given; *device* is one of several GPUs of this machine."""
        labels = {"fleet": fleet, "device": device}
        self.registry = metrics.LabelledRegistry(
            {name: value for name, value in labels.items() if value}
        )
        counter = partial(Counter, registry=self.registry)
        self.images = counter("imagefleet_images", "Images stored.")
        self.jobs = counter("imagefleet_jobs", "Jobs by outcome.", ["outcome"])
        self.model_images = counter("imagefleet_model_images", "Images stored.", ["model"])
        self.chain_images = counter(
            "imagefleet_chain_images", "Images stored of jobs with several stages.", ["stage"]
        )
        self.model_jobs = counter(
            "imagefleet_model_jobs", "Jobs by outcome and model.", ["model", "outcome"]
        )
        self.model_switches = counter(
            "imagefleet_model_switches", "Changes to a model from another.", ["model"]
        )
        self.model_switch_seconds = counter(
            "imagefleet_model_switch_seconds", "Time without an engine during changes of models."
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
            "imagefleet_lease_renewals", "Lease renewals by result.", ["result"]
        )
        self.failed_jobs = counter(
            "imagefleet_failed_jobs", "Jobs sent to the poison queue, by class of error.", ["error"]
        )
        self.node_windows = counter(
            "imagefleet_node_watch_windows", "Windows of the node watchdog by result.", ["result"]
        )
        self.reallocations = counter(
            "imagefleet_node_reallocations", "Requests for another node, by result.", ["result"]
        )
        self.node_faults = counter(
            "imagefleet_node_faults",
            "Faults of this node, found by its checks at the start and while it works.",
            ["fault"],
        )
        self.canaries = counter(
            "imagefleet_node_canaries",
            "Checks of this node by images whose result is known, by result.",
            ["result"],
        )
        self.suspect_images = counter(
            "imagefleet_suspect_images",
            "Images stored by this node between its last good check and one that failed.",
        )
        self.waiting = Gauge(
            "imagefleet_waiting_for_operator",
            "1 while this worker waits for storage, a queue or credentials to be fixed.",
            registry=self.registry,
        )
        self._kernels = Gauge(
            "imagefleet_kernels",
            "1 for where this worker has its compiled kernels from.",
            ["origin"],
            registry=self.registry,
        )
        self._worker: Info | None = None
        self.queues = QueueGauges(self.registry)
        self._collectors: tuple[Collector, ...] = ()
        self._start_at_zero()

    def set_worker_info(self, **labels: str) -> None:
        """Labels of this worker, in one series that the others are joined with."""
        if self._worker is None:
            self._worker = Info("imagefleet_worker", "This worker, always 1.", registry=None)
            self.registry.register(self._worker)
        self._worker.info(labels)

    def serve(self, models: Iterable[str]) -> None:
        """Creates the series of models before their first event."""
        for model in models:
            self.model_images.labels(model)
            self.model_switches.labels(model)
            for outcome in ("completed", "failed"):
                self.model_jobs.labels(model, outcome)

    def set_kernels(self, origin: Origin) -> None:
        """Says where the compiled kernels are from."""
        for each in get_args(Origin):
            self._kernels.labels(each).set(each == origin)

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
            (self.canaries, ("passed", "failed")),
            (self._kernels, get_args(Origin)),
            (self.failed_jobs, (error.__name__ for error in FAILURES)),
        ):
            for value in values:
                metric.labels(value)


class EngineCollector(Collector):
    """The engine's clock, its slots and the LoRA caches' hits, read at each scrape."""

    def __init__(self, engine_thread: EngineThread, library: FileLibrary) -> None:
        self._engine_thread = engine_thread
        self._library = library

    def collect(self) -> Iterator[Metric]:
        clock = self._engine_thread.clock
        yield CounterMetricFamily(
            "imagefleet_gpu_busy_seconds", "Time the engine was busy.", value=clock.busy_seconds
        )
        idle = CounterMetricFamily(
            "imagefleet_gpu_idle_seconds", "Time the engine was idle, by reason.", labels=["reason"]
        )
        waited = dict.fromkeys(IDLE_REASONS, 0.0) | clock.idle_seconds.copy()
        for reason, seconds in sorted(waited.items()):
            idle.add_metric([reason], seconds)
        yield idle
        if clock.first_image_seconds is not None:
            yield GaugeMetricFamily(
                "imagefleet_first_image_seconds",
                "Time from the worker's start to its first image, the model's loading included.",
                value=clock.first_image_seconds,
            )
        yield CounterMetricFamily(
            "imagefleet_engine_recompiles",
            "Compilations after the warm-up; more than 0 is a bug.",
            value=self._engine_thread.recompiles(),
        )
        yield GaugeMetricFamily(
            "imagefleet_engine_compiling",
            "1 while the engine compiles: it draws meanwhile, but more slowly.",
            value=self._engine_thread.is_compiling(),
        )
        slots = GaugeMetricFamily(
            "imagefleet_slots", "Slots of the engine by state.", labels=["state"]
        )
        busy = self._engine_thread.in_engine
        slots.add_metric(["busy"], busy)
        slots.add_metric(["free"], max(0, self._engine_thread.capacity - busy))
        yield slots
        lookups = CounterMetricFamily(
            "imagefleet_lora_cache",
            "LoRA cache lookups, on disk and in memory.",
            labels=["cache", "result"],
        )
        for cache, counts in (
            ("disk", self._library.lookups),
            ("memory", self._engine_thread.lora_lookups),
        ):
            for result in ("hit", "miss"):
                lookups.add_metric([cache, result], counts.get(result, 0))
        yield lookups
        yield CounterMetricFamily(
            "imagefleet_loras_without_effect",
            "LoRA files read that change nothing: all their deltas are zero.",
            value=self._engine_thread.lora_lookups.get("no_effect", 0),
        )

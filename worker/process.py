"""A worker process: storage, engine, port and signals around one pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.telemetry import probes, push
from worker import replica, tasks
from worker.engine import contract
from worker.files import check, model
from worker.metrics import WorkerMetrics
from worker.node.watchdog import limits_of
from worker.pipeline import Pipeline
from worker.salad import deletion_cost, wait_for_operator
from worker.salad import metadata as salad_metadata
from worker.salad.reallocation import Reallocation
from worker.settings import WorkerSettings
from worker.settle import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The totals of one run; *jobs* by outcome, *gpu_dollars* None where the price is unknown."""

    images: int
    jobs: Mapping[str, int]
    seconds: float
    engine_busy_seconds: float
    engine_idle_fraction: float
    gpu_dollars: float | None
    storage_dollars: float


async def run_worker(
    settings: WorkerSettings,
    *,
    load: Callable[[], contract.Engine] | None = None,
    on_settled: Callable[[Outcome], None] = lambda _: None,
) -> WorkerReport:
    """Runs a worker until a signal, or with `until_empty` until the queue is empty.

    *load* replaces the engine that the settings describe; *on_settled* is called for every job.

    On SaladCloud it does not end for what another node would meet as well: it goes on polling an
    empty queue (`until_empty` is ignored), and waits for storage, credentials and whatever else
    only the operator can fix (`worker.salad.wait_for_operator`). A broken node is given up
    (`worker.salad.reallocation`). SIGTERM may not come before the end there; leases cover that.

    Raises:
        SetupError: a queue, a credential or the model is missing; NodeError: the machine is
        broken. Jobs in flight have been handed back by then.
    """
    load = load or (lambda: _load_engine(settings))
    metadata = salad_metadata.find_metadata()
    if metadata is not None and settings.until_empty:
        log.warning(
            "--until-empty is ignored: SaladCloud restarts a worker that exits",
            extra={"action": "until_empty_ignored"},
        )
        settings = settings.model_copy(update={"until_empty": False})
    with _signals() as (stop, hurry):
        return await _Worker(settings, load, on_settled, metadata, stop, hurry).run()


@dataclass
class _Worker:
    """One process: one port and one set of metrics; a new pipeline for every attempt."""

    _settings: WorkerSettings
    _load: Callable[[], contract.Engine]
    _on_settled: Callable[[Outcome], None]
    _metadata: salad_metadata.SaladMetadata | None
    _stop: asyncio.Event
    _hurry: asyncio.Event
    _began_at: float = field(default_factory=time.monotonic)
    _metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    _pipeline: Pipeline | None = None
    _has_started: bool = False
    _port: int = 0

    def __post_init__(self) -> None:
        self._reallocation = Reallocation(self._metadata, self._metrics)

    async def run(self) -> WorkerReport:
        settings = self._settings
        async with (
            probes.serving(
                self._metrics.registry,
                is_live=self._is_live,
                is_ready=lambda: self._pipeline is not None and self._pipeline.ready,
                is_started=self._is_started,
                host=settings.host,
                port=settings.port,
            ) as self._port,
            push.pushing(self._metrics.registry, settings, job="imagefleet-worker"),
            deletion_cost.updating(self._metadata, self._jobs_in_flight),
        ):
            if self._metadata is None:
                await self._attempt()
            else:
                await self._run_on_salad()
            report = self._report()
        log.info(
            "done: %d images in %.0f s, the engine was idle %.1f %% of the time; jobs: %s",
            report.images,
            report.seconds,
            100 * report.engine_idle_fraction,
            ", ".join(f"{count} {outcome}" for outcome, count in report.jobs.items()) or "none",
            extra={"action": "stop"},
        )
        return report

    async def _run_on_salad(self) -> None:
        try:
            await wait_for_operator.retry_until_fixed(
                self._attempt,
                stop=self._stop,
                set_waiting=self._set_waiting,
                has_worked=lambda: self._pipeline is not None and self._pipeline.started,
            )
        except errors.NodeError as error:
            if await self._reallocation.request(error.message):
                await tasks.run_until(self._stop, self._reallocation.wait())
            if not self._stop.is_set():
                raise

    async def _attempt(self) -> None:
        """Opens the storage and works until there is a reason to end."""
        self._pipeline = None
        runs_on = await asyncio.to_thread(replica.find_replica, self._settings)
        identity_token = None if self._metadata is None else self._metadata.token
        async with open_storage(self._settings, identity_token=identity_token) as storage:
            if not await tasks.run_until(self._stop, storage.check()):
                return
            self._pipeline = Pipeline(
                storage,
                self._load,
                self._settings,
                on_settled=self._on_settled,
                runs_on=runs_on,
                began_at=self._began_at,
                metrics=self._metrics,
                limits=limits_of(self._settings, runs_on.gpu, on_salad=self._metadata is not None),
                reallocation=self._reallocation,
            )
            log.info(
                "pulling from %s of %s, metrics at http://%s:%d/metrics",
                storage.queue.name,
                storage.url,
                self._settings.host,
                self._port,
                extra={"action": "start", "port": self._port},
            )
            if await tasks.run_until(self._stop, model.fetch(self._settings, storage.blobs)):
                await self._pipeline.run(self._stop, self._hurry)

    def _is_live(self) -> bool:
        return self._pipeline is None or not self._pipeline.engine_thread.is_stalled

    def _is_started(self) -> bool:
        """Whether the start-up is over for SaladCloud; a node that waits is not a bad one."""
        if self._pipeline is not None and self._pipeline.started:
            self._has_started = True
        return self._has_started

    def _set_waiting(self, is_waiting: bool) -> None:
        self._metrics.waiting.set(is_waiting)
        self._has_started = True

    def _jobs_in_flight(self) -> int:
        return len(self._pipeline.settler.in_flight) if self._pipeline is not None else 0

    def _report(self) -> WorkerReport:
        seconds = time.monotonic() - self._began_at
        pipeline = self._pipeline
        if pipeline is None:
            return WorkerReport(0, {}, seconds, 0.0, 0.0, None, 0.0)
        return WorkerReport(
            images=pipeline.images_written,
            jobs=dict(pipeline.settler.outcomes),
            seconds=seconds,
            engine_busy_seconds=pipeline.engine_thread.clock.busy_seconds,
            engine_idle_fraction=pipeline.engine_thread.clock.idle_fraction,
            gpu_dollars=pipeline.cost.gpu_dollars,
            storage_dollars=pipeline.cost.storage_dollars,
        )


def _load_engine(settings: WorkerSettings) -> contract.Engine:
    path = model.local_path(settings)
    check.check_path(path)
    # Imported on the engine's thread: torch takes seconds to load, while the port already answers.
    from worker.engine.load import load_engine

    return load_engine(
        path,
        settings.device,
        precision=settings.precision,
        config=settings.config,
        prediction_type=check.prediction_type(path),
        slots=settings.slots,
        compile=settings.compile,
        fp16_accumulate=settings.fp16_accumulate,
    )


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """The first SIGTERM or SIGINT sets *stop*, the second *hurry*."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        (hurry if stop.is_set() else stop).set()
        log.info(
            "%s: %s",
            name,
            "handing back jobs in flight" if hurry.is_set() else "finishing what has begun",
            extra={"action": "signal", "signal": name},
        )

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

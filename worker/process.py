"""A worker as a process: storage, engine, port and signals around one pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.telemetry import probes, push
from worker import replica
from worker.engine import contract
from worker.files import model
from worker.metrics import WorkerMetrics
from worker.node import limits
from worker.pipeline import Pipeline
from worker.salad import deletion_cost, wait_for_operator
from worker.salad import metadata as salad_metadata
from worker.salad.reallocation import Reallocation
from worker.settings import WorkerSettings
from worker.settle import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one run of a worker came to; jobs are counted by outcome.

    *gpu_dollars* is None where the price of this machine is not known.
    """

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

    *load* stands for the engine that the settings describe; *on_settled* hears of each job's end.

    On SaladCloud it ends for no reason that another node would meet as well: an empty queue is
    looked at now and then (`until_empty` is ignored), and for storage, credentials and whatever
    else only the operator can set right it waits (`worker.salad.wait_for_operator`). A broken node
    is given back (`worker.salad.reallocation`). SIGTERM need not come before the end there; what
    counts is the leases.

    Raises:
        SetupError: a queue, a credential or the model is missing; NodeError: the machine is
        broken. Whatever was in hand has been handed back by then.
    """
    load = load or (lambda: _load_engine(settings))
    metadata = salad_metadata.find_metadata(settings.metadata_url)
    if metadata is not None and settings.until_empty:
        log.warning(
            "--until-empty is ignored: SaladCloud starts again what ends",
            extra={"action": "until_empty_ignored"},
        )
        settings = settings.model_copy(update={"until_empty": False})
    with _signals() as (stop, hurry):
        return await _Worker(settings, load, on_settled, metadata, stop, hurry).run()


class _Worker:
    """One process: its port and metrics last, its pipeline may be another after a long wait."""

    def __init__(
        self,
        settings: WorkerSettings,
        load: Callable[[], contract.Engine],
        on_settled: Callable[[Outcome], None],
        metadata: salad_metadata.SaladMetadata | None,
        stop: asyncio.Event,
        hurry: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._load = load
        self._on_settled = on_settled
        self._metadata = metadata
        self._stop = stop
        self._hurry = hurry
        self._began_at = time.monotonic()
        self._metrics = WorkerMetrics()
        self._reallocation = Reallocation(metadata, self._metrics)
        self._pipeline: Pipeline | None = None
        self._has_started = False
        self._port = settings.port

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
            deletion_cost.telling(self._metadata, self._jobs_in_flight),
        ):
            if self._metadata is None:
                await self._attempt()
            else:
                await self._run_on_salad()
            report = self._report()
        log.info(
            "done: %d images in %.0f s, the engine waited %.1f %% of the time; jobs: %s",
            report.images,
            report.seconds,
            100 * report.engine_idle_fraction,
            ", ".join(f"{count} {outcome}" for outcome, count in report.jobs.items()) or "none",
            extra={"action": "stop"},
        )
        return report

    async def _run_on_salad(self) -> None:
        try:
            await wait_for_operator.patiently(
                self._attempt,
                longest_seconds=self._settings.setup_patience_seconds,
                stop=self._stop,
                tell_waiting=self._tell_waiting,
                has_worked=lambda: self._pipeline is not None and self._pipeline.started,
            )
        except errors.NodeError as error:
            if await self._reallocation.ask(error.message):
                await wait_for_operator.unless(self._stop, self._reallocation.stay())
            if not self._stop.is_set():
                raise

    async def _attempt(self) -> None:
        """Opens the storage and works until there is a reason to end."""
        self._pipeline = None
        runs_on = await asyncio.to_thread(replica.find_replica, self._settings)
        identity_token = None if self._metadata is None else self._metadata.token
        async with open_storage(self._settings, identity_token=identity_token) as storage:
            if not await wait_for_operator.unless(self._stop, storage.check()):
                return
            self._pipeline = Pipeline(
                storage,
                self._load,
                self._settings,
                on_settled=self._on_settled,
                runs_on=runs_on,
                began_at=self._began_at,
                metrics=self._metrics,
                limits=limits.limits_of(
                    self._settings, runs_on.gpu, on_salad=self._metadata is not None
                ),
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
            if await model.fetched(self._settings, storage.blobs, self._stop):
                await self._pipeline.run(self._stop, self._hurry)

    def _is_live(self) -> bool:
        return self._pipeline is None or not self._pipeline.engine_thread.hangs(
            self._settings.stall_seconds
        )

    def _is_started(self) -> bool:
        """Whether SaladCloud may stop looking for a start: a node that waits is no bad node."""
        if self._pipeline is not None and self._pipeline.started:
            self._has_started = True
        return self._has_started

    def _tell_waiting(self, waits: bool) -> None:
        self._metrics.waiting.set(waits)
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
    # Imported on the engine's thread: torch takes seconds to load, and the port answers meanwhile.
    from worker.engine.load import load_engine

    return load_engine(
        model.place_of(settings),
        settings.device,
        precision=settings.precision,
        config=settings.config,
        slots=settings.slots,
        compile=settings.compile,
        fp16_accumulate=settings.fp16_accumulate,
    )


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """The first SIGTERM or SIGINT sets *stop*, the second *hurry*."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard(name: str) -> None:
        (hurry if stop.is_set() else stop).set()
        log.info(
            "%s: %s",
            name,
            "handing back what is in hand" if hurry.is_set() else "finishing what has begun",
            extra={"action": "signal", "signal": name},
        )

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, heard, number.name)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

"""A worker process: storage, engine, port and signals around one pipeline."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import NoReturn

from imagefleet.errors import MissingResourceError, NodeError, NoTokenError
from imagefleet.pricing import families
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.proofs import machine_of
from imagefleet.telemetry import probes, push
from imagefleet.telemetry.logs import log
from worker import progress, replica, tasks
from worker.accelerator import is_unguided
from worker.engine import load, phases
from worker.engine.contract import Engine
from worker.files import check, model
from worker.files.kernels import KernelExchange
from worker.gpu_thread import THREAD_NAME, LoadEngine, Take
from worker.gpus.parent import HURRY
from worker.inputs.reader import JobFiles
from worker.metrics import Outcome, WorkerMetrics
from worker.models import checkpoints
from worker.models.change import WorkerModels
from worker.models.checkpoints import Checkpoint
from worker.node import salad
from worker.node.watchdog import limits_of
from worker.pipeline import Machine, Pipeline
from worker.progress import Counts, Phase, Progress, ProgressMeter, WorkerReport
from worker.settings import WorkerSettings

#: Seconds between two samples of a worker's figures, each a few additions.
SAMPLE_SECONDS = 1.0

#: Seconds between two lines of progress in the log.
PROGRESS_SECONDS = 60.0

#: New objects that make Python look for garbage. By default they are 700, those of 25 small jobs,
#: hardly any of which are garbage: reference counts free what ends.
OBJECTS_PER_COLLECTION = 10_000

#: Outcomes after which a job is no longer in the queue.
_ENDED = (
    "completed",
    "duplicate",
    "failed",
    "cancelled",
    "dropped",
    "verified",
    "unverified",
)


async def run_worker(
    settings: WorkerSettings,
    *,
    load: LoadEngine | None = None,
    on_settled: Callable[[Outcome], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    gpu: str | None = None,
) -> WorkerReport:
    """Runs a worker until a signal, or with `until_empty` until the queue is empty.

    *load* replaces the engine that the settings describe; *on_settled* is called for every job.
    *on_progress* is called every second, in place of a line a minute, and one at the end, in the
    log. *gpu* is the number of the worker's GPU, where others of the machine have workers as well.

    On SaladCloud it does not end for what another node would meet as well: it goes on polling an
    empty queue (`until_empty` is ignored), and waits for storage, credentials and whatever else
    only the operator can fix (`worker.node.salad`). A broken node is given up. SIGTERM may not come
    before the end there; leases cover that.

    Raises SetupError if a queue, a credential or the model is missing, and NodeError if the machine
    is broken; jobs in flight have been handed back by then.
    """
    metadata = salad.find_metadata()
    if metadata is not None and settings.until_empty:
        log.warning(
            "--until-empty is ignored: SaladCloud restarts workers",
            action="until_empty_ignored",
        )
        settings = settings.model_copy(update={"until_empty": False})
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    with _signals(is_one_of_several=gpu is not None) as (stop, hurry, received):
        worker = _Worker(
            settings, load, on_settled, on_progress, metadata, stop, hurry, gpu
        )
        report = await worker.run()
    return (
        replace(report, stopped_by=received[0])
        if received and settings.until_empty
        else report
    )


async def _check_storage(storage: Storage) -> None:
    """Checks queues and containers; that of files, which only some jobs need, may be missing."""
    await storage.check()
    files = storage.files
    try:
        await files.check()
    except NoTokenError:
        raise
    except MissingResourceError as error:
        files.may_be_missing = True
        log.warning(
            f"no files, and no list of what is cancelled: {error}", action="no_files"
        )


@dataclass
class _Worker:
    """One process: one port and one set of metrics; a new pipeline for every attempt."""

    _settings: WorkerSettings
    _load: LoadEngine | None
    _on_settled: Callable[[Outcome], None] | None
    _on_progress: Callable[[Progress], None] | None
    _metadata: salad.SaladMetadata | None
    _stop: asyncio.Event
    _hurry: asyncio.Event
    #: The number of its GPU, where others of the machine have workers as well.
    _one_of_several: str | None = None
    _began_at: float = field(default_factory=time.monotonic)
    _meter: ProgressMeter = field(default_factory=ProgressMeter)
    _pipeline: Pipeline | None = None
    _waiting_for: Phase | None = None
    _has_started: bool = False
    _port: int = 0
    _kernels: KernelExchange | None = None
    _engine: Engine | None = None
    _own_files: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._metrics = WorkerMetrics(self._settings.fleet_name, self._one_of_several)
        # The container is the parent's to give up: the other GPUs go on.
        self._container = None if self._one_of_several else self._metadata

    async def run(self) -> WorkerReport:
        settings = self._settings
        async with (
            probes.serving(
                self._metrics.registry,
                is_live=lambda: (
                    self._pipeline is None
                    or not self._pipeline.engine_thread.is_stalled
                ),
                is_ready=lambda: self._pipeline is not None and self._pipeline.ready,
                is_started=self._is_started,
                host=settings.host,
                port=settings.port,
            ) as self._port,
            push.pushing(self._metrics.registry, settings, job="imagefleet-worker"),
            tasks.background(self._show_progress(), "show progress"),
        ):
            if self._metadata is None:
                await self._attempt()
            else:
                await self._run_on_salad()
            report = self._report()
        if self._on_progress is None:
            progress.log_report(report)
        return report

    async def _run_on_salad(self) -> None:
        try:
            await salad.retry_until_fixed(
                self._attempt,
                stop=self._stop,
                set_waiting=self._set_waiting,
                has_worked=lambda: (
                    self._pipeline is not None and self._pipeline.started
                ),
            )
        except NodeError as error:
            requests = self._metrics.reallocations
            if self._container and await self._container.leave(error.message, requests):
                self._waiting_for = "waiting for another node"
                await tasks.first_of(
                    self._stop.wait(), timeout_seconds=salad.REALLOCATION_SECONDS
                )
            if not self._stop.is_set():
                raise

    async def _attempt(self) -> None:
        """Opens the storage and works until there is a reason to end."""
        self._pipeline = None
        if self._load is None:
            # While the storage answers and the model comes; a failure shows later.
            tasks.in_daemon_thread(load.import_libraries, f"{THREAD_NAME} import")
        runs_on = await asyncio.to_thread(replica.find_replica, self._settings)
        identity_token = self._metadata.token if self._metadata else None
        async with open_storage(
            self._settings, identity_token=identity_token
        ) as storage:
            self._pipeline = Pipeline(
                storage,
                self._load,
                self._settings,
                on_settled=self._on_settled,
                on_depth=self._measured,
                metrics=self._metrics,
                machine=Machine(
                    runs_on,
                    self._began_at,
                    limits_of(
                        self._settings, runs_on.gpu, on_salad=self._metadata is not None
                    ),
                ),
            )
            # After the pipeline, whose metrics name this worker also while it waits.
            if not await tasks.run_until(self._stop, _check_storage(storage)):
                return
            name = self._settings.name
            prover = storage.prover
            if prover is not None and machine_of(name) != prover.machine:
                log.warning(
                    f"no proof of what {name} draws: its name does not begin with"
                    f" {prover.machine}-, the machine's id, as without --name",
                    action="no_proof",
                )
            key = self._settings.trusted_key
            signed = f"jobs signed with {key} " if key else ""
            address = (
                f"http://{probes.authority(self._settings.host, self._port)}/metrics"
            )
            log.info(
                f"pulling {signed}from {storage.queue.name} of {storage.url}, metrics at {address}",
                action="start",
                port=self._port,
            )
            self._pipeline.start_up_phase = "fetching the model"
            finding = asyncio.ensure_future(self._find_models(storage))
            with phases.timed("download"):
                is_found = await tasks.run_until(self._stop, finding)
            if is_found:
                models = finding.result()
                self._kernels = KernelExchange.of_worker(
                    self._settings,
                    storage.files,
                    may_share=self._metadata is None,  # not from strangers' machines
                )
                served = None if self._load else models
                await self._pipeline.run(self._stop, self._hurry, served)

    async def _find_models(self, storage: Storage) -> WorkerModels:
        """Finds the models of the settings, and fetches the one to begin with."""

        async def fetch(checkpoint: Checkpoint) -> Checkpoint:
            settings = await model.fetch(checkpoint.settings, storage.files)
            return replace(checkpoint, settings=settings)

        self._own_files = await JobFiles(storage, self._settings).own_paths()
        found = await checkpoints.find(self._settings, storage.files)
        for at, item in enumerate(found):
            if not model.has_known_name(
                item.settings
            ):  # nor, then, the queue of its jobs
                fetched = await fetch(item)
                found[at] = replace(fetched, name=model.name_of(fetched.settings))
        checkpoints.refuse_unusable_names(found)
        models = WorkerModels(found, fetch, self._load_engine, self._read_weights)
        queue = storage.models.served(models.names if len(found) > 1 else [])
        await models.begin(queue)
        return models

    def _is_started(self) -> bool:
        """True once the start-up is over for SaladCloud; a node that waits is not a bad one."""
        if self._pipeline is not None and self._pipeline.started:
            self._has_started = True
        return self._has_started

    def _set_waiting(self, is_waiting: bool) -> None:
        self._metrics.waiting.set(is_waiting)
        self._waiting_for = "waiting for the operator" if is_waiting else None
        self._has_started = True

    def _measured(self, messages: int) -> None:
        self._meter.measured(time.monotonic(), messages, self._counts())

    def _counts(self) -> Counts:
        pipeline = self._pipeline
        outcomes = self._metrics.outcomes
        dollars = None
        in_flight = recording = 0
        if pipeline is not None:
            dollars = pipeline.cost.dollars
            in_flight = len(pipeline.settler.in_flight)
            recording = pipeline.settler.pending.jobs
        return Counts(
            images=self._metrics.images_stored,
            ended_jobs=sum(outcomes[outcome] for outcome in _ENDED) + recording,
            failed_jobs=outcomes["failed"],
            cancelled_jobs=outcomes["cancelled"],
            dropped_jobs=outcomes["dropped"],
            jobs_in_flight=max(0, in_flight - recording),
            dollars=dollars,
        )

    def _phase(self) -> Phase:
        if self._stop.is_set():
            return "draining"
        if self._waiting_for is not None:
            return self._waiting_for
        return self._pipeline.phase if self._pipeline else "connecting to the storage"

    def _progress(self) -> Progress:
        now = time.monotonic()
        why_waiting = self._pipeline.puller.why_waiting if self._pipeline else None
        return self._meter.read(
            now, now - self._began_at, self._phase(), self._counts(), why_waiting
        )

    async def _show_progress(self) -> NoReturn:
        """Calls `on_progress` every second, or logs a line a minute."""
        show = self._on_progress or progress.log_progress
        seconds = SAMPLE_SECONDS if self._on_progress else PROGRESS_SECONDS
        try:
            self._progress()  # the first line's rates are counted from here
            while True:
                if self._stop.is_set():
                    await asyncio.sleep(seconds)
                else:  # a drain shows at once
                    await tasks.first_of(self._stop.wait(), timeout_seconds=seconds)
                show(self._progress())
        except Exception:
            # No reason to end a worker.
            log.exception("progress is no longer shown", action="progress_failed")
            raise

    def _report(self) -> WorkerReport:
        seconds = time.monotonic() - self._began_at
        counted = self._metrics.images_stored, dict(self._metrics.outcomes)
        if self._pipeline is None:
            return WorkerReport(*counted, seconds, start_up_seconds=seconds)
        clock = self._pipeline.engine_thread.clock
        cost = self._pipeline.cost
        return WorkerReport(
            *counted,
            seconds=seconds,
            start_up_seconds=cost.wasted_seconds()["start_up"],
            engine_busy_seconds=clock.busy_seconds,
            engine_idle_fraction=clock.idle_fraction,
            gpu_dollars=cost.gpu_dollars,
            storage_dollars=cost.storage_dollars,
        )

    def _load_engine(self, checkpoint: Checkpoint) -> Engine:
        settings = checkpoint.settings
        check.check_path(model.local_path(settings))
        if self._one_of_several and settings.device != "cpu":
            from worker.engine import device

            device.check_listed_gpu()
        self._engine = None  # its memory is the next one's
        own = replace(
            engine_settings(settings, **self._own_files),
            queue_seconds=lambda: self._meter.queue_seconds,
            exchange=self._kernels,
        )
        self._engine = load.load_engine(own)
        return self._engine

    def _read_weights(self, checkpoint: Checkpoint) -> Take | None:
        """Another model's, for the engine as it is."""
        path = model.local_path(checkpoint.settings)
        check.check_path(path)
        family = families.of_title(check.family(path)).slug
        if self._engine is None or self._engine.family != family:
            return None  # nothing is read that could not be used
        return load.read_beside(
            self._engine, engine_settings(checkpoint.settings, **self._own_files)
        )


def engine_settings(
    settings: WorkerSettings, accelerator: Path | None = None, vae: Path | None = None
) -> load.EngineSettings:
    """The engine that a worker's settings describe; its model is on this machine."""
    path = model.local_path(settings)
    return load.EngineSettings(
        path,
        settings.device,
        precision=settings.precision,
        config=settings.config,
        prediction_type=check.prediction_type(path),
        accelerator=accelerator,
        vae=vae,
        is_unguided=is_unguided(settings),
        taesd=settings.taesd,
        slots=settings.slots,
        compile="off" if settings.compile == "off" else "background",
        kernels=settings.cache.expanduser() / "kernels",
        fp16_accumulate=settings.fp16_accumulate,
    )


@contextlib.contextmanager
def _signals(
    *,
    is_one_of_several: bool,
) -> Iterator[tuple[asyncio.Event, asyncio.Event, list[Signals]]]:
    """The first SIGTERM or SIGINT sets *stop*, the second *hurry*; the list has those received.

    *is_one_of_several*: SIGTERM stops and SIGINT hurries, as the parent sends them; a supervisor
    may send SIGTERM to both.
    """
    stop = asyncio.Event()
    hurry = asyncio.Event()
    received: list[Signals] = []

    def on_signal(number: Signals) -> None:
        hurries = number is HURRY if is_one_of_several else stop.is_set()
        if stop.is_set() and not hurries:
            return
        received.append(number)
        if hurries:
            hurry.set()
        stop.set()
        what = "handing back jobs in flight" if hurries else "finishing what has begun"
        log.info(f"{number.name}: {what}", action="signal")

    with tasks.on_signals(on_signal):
        yield stop, hurry, received

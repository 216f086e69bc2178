"""The pipeline: pull -> prepare -> generate -> encode -> upload -> record -> acknowledge.

Drain order, in this order and no other: stop pulling; keep renewing; finish what the engine has
begun (within the grace time); flush encodes and uploads; hand the rest back with visibility 0;
stop renewing. A side task that ends, the lease keeper say, stops the worker: it never limps on.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from imagefleet import concurrency
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.errors import NodeError, SetupError
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import log
from worker import leases, tasks
from worker.engine.contract import Engine
from worker.files import library, model
from worker.files.manifest import FutureHash
from worker.gpu_thread import EngineThread, LoadEngine
from worker.inputs.reader import JobFiles
from worker.jobs.bundles import PACKS
from worker.jobs.in_flight import InFlightJob
from worker.metrics import (
    CostMeter,
    DepthMeter,
    EngineCollector,
    Outcome,
    WorkerMetrics,
)
from worker.models.change import Following, WorkerModels, make_queues, note_served
from worker.node.checks import NodeChecks
from worker.node.watchdog import NO_LIMITS, NodeLimits
from worker.progress import Phase
from worker.pull import Puller
from worker.replica import UNKNOWN, Replica
from worker.settings import WorkerSettings, version
from worker.settle import Settler
from worker.stages.encode import ENCODING, EncodeStage
from worker.stages.generate import DETAILED, GenerateStage
from worker.stages.judge import JudgeStage
from worker.stages.prepare import URGENT_PREPARERS, PrepareStage
from worker.stages.requests import PREPARERS
from worker.stages.upload import STORAGE_RETRIES, UPLOADS, UploadStage
from worker.tasks import SideTasks

#: Finished images that may wait to be encoded before the engine blocks.
ENCODE_BACKLOG = 64

#: The time for handing back what is left: storage that does not answer must not keep a worker from
#: exiting, since the leases expire by themselves.
HAND_BACK_SECONDS = 5.0

#: Time for pulled jobs before the model changes; one that waits for its LoRA is handed back.
FINISH_SECONDS = 60.0


@dataclass(frozen=True)
class Machine:
    replica: Replica = UNKNOWN
    #: Start of its bill (monotonic seconds); None: with the pipeline.
    began_at: float | None = None
    limits: NodeLimits = NO_LIMITS


class Pipeline:
    """One worker's stages, side tasks and drain, around one engine."""

    def __init__(
        self,
        storage: Storage,
        load: LoadEngine | None,
        settings: WorkerSettings,
        *,
        on_settled: Callable[[Outcome], None] | None = None,
        on_depth: Callable[[int], None] = lambda _: None,
        retry_policy: concurrency.RetryPolicy = STORAGE_RETRIES,
        metrics: WorkerMetrics | None = None,
        machine: Machine = Machine(),
    ) -> None:
        """*load* returns the engine, on its own thread; None: `run` is given models that do.

        *on_depth* is called with the number of messages in the queue whenever that is measured.
        """
        self.metrics = metrics or WorkerMetrics()
        #: The models that it serves in turn; None: one engine's alone.
        self.models: WorkerModels | None = None
        self.started = False
        self.ready = False
        self.start_up_phase: Phase = "connecting to the storage"
        self._storage = storage
        self._settings = settings
        self._on_settled = on_settled
        self._load_engine = load
        self.engine_thread = EngineThread(ENCODE_BACKLOG, machine.began_at)
        self.cost = CostMeter(
            self.engine_thread,
            machine.replica,
            storage.operations,
            storage.blobs.clock,
        )
        self._queue = storage.models.served([])
        self._depths = DepthMeter(self._queue, storage.poison, self.metrics, on_depth)
        self._keeper = leases.LeaseKeeper(
            self._queue,
            settings.lease_seconds,
            on_renewal=lambda result: self.metrics.lease_renewals.labels(result).inc(),
        )
        self._cancelled = CancelledCampaigns(storage.files, storage.queue.name)
        self.settler = Settler(
            storage,
            self._keeper,
            self.metrics,
            self.cost,
            settings,
            retry_policy,
            self._settled,
            self._cancelled,
        )
        self._checks = NodeChecks(
            storage,
            settings,
            machine.limits,
            self.metrics,
            self.engine_thread,
            retry_policy,
        )
        self.puller = Puller(self._queue, self.settler, self.engine_thread)
        #: The pull of one model's jobs; None: the node is still checked.
        self._pull: asyncio.Task[None] | None = None
        self._side_tasks = SideTasks()
        self._files = JobFiles(storage, settings)
        self.metrics.collect_from(
            EngineCollector(self.engine_thread, self._files.loras),
            self.cost,
        )
        self.metrics.set_worker_info(
            worker=settings.name,
            version=version(),
            gpu=machine.replica.gpu,
            group=settings.group,
            priority=settings.priority,
        )

    @property
    def phase(self) -> Phase:
        if not self.started:
            return self.start_up_phase
        return "generating" if self.settler.in_flight else "waiting for jobs"

    async def run(
        self,
        stop: asyncio.Event,
        hurry: asyncio.Event,
        models: WorkerModels | None = None,
    ) -> None:
        """Works until *stop* is set, or with --until-empty until the queue is empty; then drains.

        *hurry* ends the grace time at once. *models* are served in turn, unless the pipeline was
        given an engine. Raises NodeError if this machine cannot do its work, and SetupError if the
        operator has to act; jobs in flight have been handed back by then.
        """
        self.models = models
        await self._checks.refuse_quarantined()
        self.start_up_phase = "loading the model"
        starting = asyncio.create_task(self._start_up(), name="start up")
        try:
            if await tasks.run_until(stop, starting):
                await self._work(starting.result(), stop, hurry)
                await self._depths.measure_last()
        finally:
            self._files.hashes.close()
            await self.engine_thread.stop()

    async def _start_up(self) -> Engine:
        """Loads the engine and checks the node."""
        self._hash_model()
        async with self._checks.start_up.limited():
            return await self.engine_thread.start(
                lambda: self._checks.start_up.load(self._load)
            )

    def _hash_model(self) -> FutureHash:
        """The hash of the present model's file; begun by the first call."""
        settings = self.models.current.settings if self.models else self._settings
        return self._files.hashes.of_model(
            model.local_path(settings), settings.model_sha256
        )

    def _load(self) -> Engine:
        load = self._load_engine
        if load is None:
            if self.models is None:
                raise RuntimeError("a pipeline without an engine is run with models")
            load = self.models.load_current
        engine = load()
        self.start_up_phase = "checking the node"
        return engine

    async def _work(
        self, engine: Engine, stop: asyncio.Event, hurry: asyncio.Event
    ) -> None:
        self.cost.ready()
        names = self.models.names if self.models else [engine.model_name]
        for name in names:
            self._queue.add(name, self._storage.models.of(name))
        self.metrics.serve(names)
        await make_queues(self._storage.models, names)
        changed_at = None
        while True:
            following = await self._serve(engine, changed_at, stop, hurry)
            if following is None or self.models is None:
                return
            changed_at = time.monotonic()
            if (last_at := self.engine_thread.clock.last_at) is not None:
                changed_at = max(last_at, following.prepared_at)
            replacing = asyncio.ensure_future(self._replace(self.models, following))
            if not await tasks.run_until(stop, replacing):
                return
            engine = replacing.result()

    async def _replace(self, models: WorkerModels, following: Following) -> Engine:
        """The engine of the following model; of the present one, if that cannot be loaded."""
        try:
            engine = await self.engine_thread.replace(
                lambda: models.load(following.checkpoint), following.take
            )
        except (SetupError, NodeError) as error:
            models.drop(following.checkpoint, error, self._queue)
            return await self.engine_thread.replace(models.load_current)
        models.current = following.checkpoint
        return engine

    async def _serve(
        self,
        engine: Engine,
        changed_at: float | None,
        stop: asyncio.Event,
        hurry: asyncio.Event,
    ) -> Following | None:
        """Draws one model's jobs; returns the model to change to, None to end.

        No job is in flight then. Nothing has been drawn since *changed_at*.
        """
        async with self._stages(engine) as (prepare, generate):
            await tasks.first_of(
                self._checks.begin(engine), stop.wait(), self._side_tasks.watch()
            )
            if self.models and changed_at is not None:
                self.models.changed(time.monotonic() - changed_at, self.metrics)
            self.puller.restart()
            self._pull = asyncio.create_task(self.puller.run(prepare.add), name="pull")
            self.started = self.ready = True
            following = await self._draw(self._pull, stop)
            if following is not None:
                # What was pulled, or else what the engine has begun.
                if not await self._finish(
                    generate, FINISH_SECONDS, stop, puts_off=False
                ):
                    await self._finish(generate, FINISH_SECONDS, stop, puts_off=True)
                return None if stop.is_set() else following
            self.ready = False
            self.metrics.draining.set(1)
            await self._finish(
                generate, self._settings.grace_seconds, hurry, puts_off=True
            )
        return None

    @contextlib.asynccontextmanager
    async def _stages(
        self, engine: Engine
    ) -> AsyncIterator[tuple[PrepareStage, GenerateStage]]:
        """Stages and side tasks for *engine*; at the end, jobs in flight are handed back."""
        if self.models:
            self._queue.receive_only(self.models.served_now())
        settler = self.settler
        watchdog = self._checks.watchdog
        settler.model_name = settler.bundles.model_name = engine.model_name
        upload = UploadStage(settler, watchdog)
        model_hash = self._hash_model()
        encode = EncodeStage(settler, watchdog, model_hash, upload, engine.is_int8)
        judge = JudgeStage(
            settler, watchdog, self.engine_thread, self._files.judges, encode
        )
        generate = GenerateStage(
            engine,
            self.engine_thread,
            settler,
            watchdog,
            self.puller,
            encode,
            judge,
            self._files.detectors,
        )
        prepare = PrepareStage(engine, self._files, settler, self.puller, generate)
        self._side_tasks = self._start_side_tasks(model_hash)
        self._side_tasks.start("generate", generate.run())
        self._side_tasks.start("record", settler.pending.run())
        for name, run, count in (
            ("prepare", prepare.run, PREPARERS),
            ("prepare urgent", partial(prepare.run, is_urgent=True), URGENT_PREPARERS),
            ("details", generate.draw_details, DETAILED),
            ("judge", judge.run, 1),
            ("encode", encode.run, ENCODING),
            ("upload", upload.run, UPLOADS),
            ("pack", settler.bundles.run, PACKS),
            ("acknowledge", settler.pending.finish, UPLOADS),
        ):
            for _ in range(count):
                self._side_tasks.start(name, run())
        try:
            yield prepare, generate
        finally:
            self.ready = False
            # What waits for the engine would keep the pull waiting.
            generate.stop_accepting()
            await self._stop_pulling()
            self._pull = None
            handing_back = map(settler.hand_back, list(settler.in_flight))
            # Of bundles, what is drawn is stored before the rest is handed back.
            await self._hand_back([*handing_back, settler.nothing_in_flight.wait()])
            await self._side_tasks.cancel()
            prepare.close()
            encode.close()
            await self._checks.record_suspects()

    async def _draw(
        self, pull: asyncio.Task[None], stop: asyncio.Event
    ) -> Following | None:
        """Returns the model to change to; None: *stop* is set or the queue is empty."""
        ends: list[Awaitable[Any]] = [
            asyncio.shield(pull),
            stop.wait(),
            self._side_tasks.watch(),
        ]
        following: asyncio.Future[Following] | None = None
        if self.models and len(self.models.names) > 1:
            following = asyncio.ensure_future(self.models.following(self.puller))
            ends.append(following)
        await tasks.first_of(*ends)
        if following is None or following.cancelled() or stop.is_set():
            return None
        return following.result()

    async def _finish(
        self,
        generate: GenerateStage,
        seconds: float,
        end: asyncio.Event,
        *,
        puts_off: bool,
    ) -> bool:
        """Finishes the jobs in flight, unless *end* is set; False: the time is over.

        With *puts_off*, what the engine has not begun is handed back.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop_pulling()
                if puts_off:
                    await self._hand_back(
                        map(self.settler.hand_back, generate.stop_accepting())
                    )
                finished = self.settler.nothing_in_flight.wait()
                await tasks.first_of(finished, end.wait(), self._side_tasks.watch())
                return True
        return False

    def _start_side_tasks(self, model_hash: FutureHash) -> SideTasks:
        side_tasks = SideTasks()
        side_tasks.start("keep leases", self._keeper.run())
        for name, watch in self._checks.watches().items():
            side_tasks.start(name, watch)
        side_tasks.start(
            "watch cancelled campaigns", self._cancelled.watch(self.settler.in_flight)
        )
        side_tasks.start("measure queues", self._depths.run())
        held = partial(self._held, model_hash)
        models = self.models
        noting = note_served(
            self._storage.models,
            lambda: models.names if models else [self.settler.model_name],
            held,
        )
        side_tasks.start("note models", noting)
        return side_tasks

    async def _held(self, model_hash: FutureHash) -> tuple[str, dict[str, object]]:
        """The model that draws now; its hash, if it has one, and LoRAs of the worker's own."""
        name = self.settler.model_name
        folder = self._settings.lora_directory
        loras = await asyncio.to_thread(library.names, folder) if folder else []
        # Images wait for the hash as well: it goes on if this task ends.
        found = await asyncio.shield(asyncio.wrap_future(model_hash))
        return name, {"hash": found, "loras": loras}

    async def _stop_pulling(self) -> None:
        """Lets a receive in flight end: cancelled, it would leave its messages leased."""
        if self._pull is None:
            return
        self.puller.stop()
        await asyncio.wait({self._pull}, timeout=HAND_BACK_SECONDS)
        await tasks.cancel([self._pull])

    async def _hand_back(self, calls: Iterable[Awaitable[object]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                for result in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(result, Exception):
                        log.warning(
                            f"a job's lease will expire: {result}",
                            action="hand_back_failed",
                        )

    def _settled(self, entry: InFlightJob, outcome: Outcome) -> None:
        self.puller.not_ahead(entry)
        if self._on_settled is not None:
            self._on_settled(outcome)

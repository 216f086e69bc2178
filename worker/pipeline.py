"""A job's way: pull -> prepare -> generate -> encode -> upload -> acknowledge, all at once.

Drain order, in this order and no other: stop pulling; keep renewing; finish what the engine has
begun (within the grace time); flush encodes and uploads; hand the rest back with visibility 0;
stop renewing. A task that dies, the lease keeper's say, stops the worker: it never limps on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from importlib import metadata
from typing import Any

from imagefleet import errors, retry
from imagefleet.storage import protocol
from worker import replica
from worker.cost import CostMeter
from worker.engine import contract
from worker.files.loras import LoraLibrary
from worker.gpu_thread import EngineThread
from worker.in_flight import InFlightJob
from worker.leases import LeaseKeeper
from worker.metrics import EngineCollector, WorkerMetrics
from worker.node import limits as node_limits
from worker.node.check import NodeCheck
from worker.node.watchdog import NodeWatchdog
from worker.pull import Puller
from worker.salad.reallocation import Reallocation
from worker.settings import WorkerSettings
from worker.settle import Outcome, Settler
from worker.stages.stages import Stages

log = logging.getLogger(__name__)

#: Finished images that may wait to be encoded before the engine is held back.
ENCODE_BACKLOG = 64

#: What is left is handed back within this time; a storage that does not answer must not keep a
#: worker from exiting, since the leases run out by themselves.
HAND_BACK_SECONDS = 5.0

#: A node that works badly may finish what it holds, which is ten seconds' work for a good one.
LAST_JOBS_SECONDS = 120.0


def _tell_of_outage(error: errors.TransientError) -> None:
    log.warning("the storage does not answer: %s", error, extra={"action": "storage_outage"})


#: Storage that is down for a few minutes costs no generated image; the leases are kept meanwhile.
STORAGE_RETRIES = retry.RetryPolicy(
    tries=15, longest_wait_seconds=30, waits_for_access=True, on_retry=_tell_of_outage
)


class Pipeline:
    """One worker's stages around one engine."""

    def __init__(
        self,
        storage: protocol.Storage,
        load: Callable[[], contract.Engine],
        settings: WorkerSettings,
        *,
        on_settled: Callable[[Outcome], None] = lambda _: None,
        retry_policy: retry.RetryPolicy = STORAGE_RETRIES,
        runs_on: replica.Replica = replica.UNKNOWN,
        began_at: float | None = None,
        metrics: WorkerMetrics | None = None,
        limits: node_limits.NodeLimits = node_limits.NO_LIMITS,
        reallocation: Reallocation | None = None,
    ) -> None:
        """*load* makes the engine; it is called on the engine's own thread.

        The replica is billed from *began_at* on (monotonic seconds), by default from now. *limits*
        are what this node is held to, *replacement* the way off it.
        """
        self.metrics = metrics or WorkerMetrics()
        self.started = False
        self.ready = False
        self._storage = storage
        self._settings = settings
        self._retry_policy = retry_policy
        self._keeper = LeaseKeeper(
            storage.queue,
            settings.lease_seconds,
            on_renewal=lambda result: self.metrics.lease_renewals.labels(result).inc(),
        )
        self.settler = Settler(
            storage,
            self._keeper,
            self.metrics,
            max_attempts=settings.max_attempts,
            worker_name=settings.name,
            retry_policy=retry_policy,
            on_settled=self._settled,
        )
        self._on_settled = on_settled
        self._check = NodeCheck(storage.blobs, settings, limits)
        self.engine_thread = EngineThread(
            lambda: self._check.load(load), why_idle=self._why_idle, backlog=ENCODE_BACKLOG
        )
        self._watch = NodeWatchdog(self.engine_thread, limits, self.metrics)
        self._reallocation = reallocation or Reallocation(None, self.metrics)
        self._puller = Puller(
            storage.queue, self._keeper, self.settler, self.engine_thread, self.metrics, settings
        )
        self._library = LoraLibrary(
            storage.blobs,
            directory=settings.lora_directory,
            cache=settings.lora_cache,
            cache_bytes=settings.lora_cache_megabytes * 2**20,
            max_bytes=settings.lora_megabytes * 2**20,
        )
        self.cost = CostMeter(self.engine_thread, runs_on, storage.operations, began_at)
        self.metrics.follow(
            EngineCollector(self.engine_thread, self._library), self.cost, self._check
        )
        self.metrics.introduce(
            worker=settings.name,
            version=_version(),
            gpu=runs_on.gpu,
            group=settings.group,
            priority=settings.priority,
        )
        self.images_written = 0

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Works until *stop* is set, or with --until-empty until the queue is; then drains.

        *hurry* ends the grace time at once.

        Raises:
            NodeError: this machine cannot do its work; SetupError: the operator has to act.
            Whatever was in hand has been handed back by then.
        """
        stopping = asyncio.create_task(stop.wait(), name="stop")
        starting = asyncio.create_task(self._start_up(), name="start up")
        try:
            await _first_end({starting, stopping}, [])
            if starting.done():
                await self._work(starting.result(), stopping, hurry)
        finally:
            await _cancel([starting, stopping])
            await self.engine_thread.stop()

    async def _start_up(self) -> contract.Engine:
        """Loads the engine and checks the node, which may use different parts of it at once."""
        uploading = asyncio.create_task(self._check.upload(), name="check upload")
        try:
            async with self._check.within_its_time():
                engine = await self.engine_thread.start()
                await uploading
        finally:
            await _cancel([uploading])
        return engine

    async def _work(
        self, engine: contract.Engine, stopping: asyncio.Task[Any], hurry: asyncio.Event
    ) -> None:
        self.cost.ready()
        stages = Stages(
            self._storage,
            engine,
            self.engine_thread,
            self._puller,
            self.settler,
            self._library,
            self.metrics,
            self._settings,
            retry_policy=self._retry_policy,
            cost=self.cost,
            watch=self._watch,
        )
        pull = asyncio.create_task(self._puller.run(stages.pulled.put), name="pull")
        workers = self._start(stages)
        self.started = self.ready = True
        try:
            await _first_end({pull, stopping}, workers)
            self.ready = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.grace_seconds):
                    await self._stop_pulling(pull)
                    await self._finish(stages, workers, hurry)
        finally:
            self.ready = False
            await self._stop_pulling(pull)
            await self._hand_back(self.settler.in_flight)
            await _cancel(workers)
            stages.close()
            self.images_written = stages.images_written

    def _start(self, stages: Stages) -> list[asyncio.Task[Any]]:
        side_tasks: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("keep leases", 1, self._keeper.run),
            ("watch engine", 1, lambda: self.engine_thread.watch(self._settings.stall_seconds)),
        ]
        if self._watch.is_on:
            side_tasks.append(("watch node", 1, lambda: self._watch_node(stages)))
        if self._settings.depth_seconds:
            side_tasks.append(("measure queues", 1, self._measure_queues))
        return [
            asyncio.create_task(_run(work), name=name)
            for name, count, work in (*side_tasks, *stages.tasks())
            for _ in range(count)
        ]

    async def _stop_pulling(self, pull: asyncio.Task[None]) -> None:
        """Lets a receive in flight end: called off, it would leave its messages leased."""
        self._puller.stop()
        await asyncio.wait({pull}, timeout=HAND_BACK_SECONDS)
        await _cancel([pull])

    async def _finish(
        self, stages: Stages, workers: list[asyncio.Task[Any]], hurry: asyncio.Event
    ) -> None:
        """Hands back what has not begun and waits for what has."""
        await self._hand_back(stages.withdraw())
        done = asyncio.create_task(self.settler.nothing_in_flight.wait(), name="finish")
        hurried = asyncio.create_task(hurry.wait(), name="hurry")
        try:
            await _first_end({done, hurried}, workers)
        finally:
            await _cancel([done, hurried])

    async def _hand_back(self, jobs: Iterable[InFlightJob]) -> None:
        handing = [self.settler.hand_back(in_flight) for in_flight in list(jobs)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                for result in await asyncio.gather(*handing, return_exceptions=True):
                    if isinstance(result, Exception):
                        log.warning(
                            "a job could not be handed back, its lease runs out: %s",
                            result,
                            extra={"action": "hand_back_failed"},
                        )

    async def _watch_node(self, stages: Stages) -> None:
        """Finishes what is in hand on a node that works badly; goes on where no other is given.

        Raises:
            NodeError: another node is on its way, or there is nobody to ask for one.
        """
        while True:
            reason = await self._watch.broken(stages.canary.verdict)
            self._puller.pause()
            self.ready = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_JOBS_SECONDS):
                    await self.settler.nothing_in_flight.wait()
            if not self._reallocation.is_possible or await self._reallocation.ask(reason):
                raise errors.NodeError(reason)
            self._puller.resume()
            self.ready = True

    def _why_idle(self) -> str:
        return self._puller.why_idle()

    def _settled(self, in_flight: InFlightJob, outcome: Outcome) -> None:
        self._puller.left(in_flight)
        self._on_settled(outcome)

    async def _measure_queues(self) -> None:
        untold = {self._storage.queue.name, self._storage.poison.name}
        while True:
            for queue in (self._storage.queue, self._storage.poison):
                try:
                    depth = await queue.depth()
                except errors.FleetError as error:
                    # A worker's token need not allow it, and no job depends on it.
                    if queue.name in untold:
                        untold.discard(queue.name)
                        log.info(
                            "the depth of %s is not measured: %s",
                            queue.name,
                            error,
                            extra={"action": "depth_unknown"},
                        )
                else:
                    self.metrics.queues.update(queue.name, depth)
            seconds = self._settings.depth_seconds
            await asyncio.sleep(random.uniform(seconds / 2, 3 * seconds / 2))  # noqa: S311 - jitter


def _version() -> str:
    try:
        return metadata.version("imagefleet")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that is not installed works all the same


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _first_end(ends: set[asyncio.Task[Any]], workers: list[asyncio.Task[Any]]) -> None:
    """Waits until one of *ends* is done; raises what any of them, or of the workers, raised."""
    done, _ = await asyncio.wait({*ends, *workers}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        if task not in ends:
            raise RuntimeError(f"the task {task.get_name()!r} ended, which it must not")


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

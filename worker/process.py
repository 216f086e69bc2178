"""A worker as a process: storage, engine, port and signals around one pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jobs import homes, storage
from worker import health, push, replica
from worker.engine import contract
from worker.pipeline import Pipeline
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

    Raises:
        SetupError: a queue, a credential or the model is missing; NodeError: the machine is
        broken. Whatever was in hand has been handed back by then.
    """
    load = load or (lambda: _load_engine(settings))
    async with homes.open_storage(settings) as home:
        await home.check()
        with _signals() as (stop, hurry):
            return await _run(home, load, settings, on_settled, stop, hurry)


async def _run(
    home: storage.Storage,
    load: Callable[[], contract.Engine],
    settings: WorkerSettings,
    on_settled: Callable[[Outcome], None],
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> WorkerReport:
    began_at = time.monotonic()
    runs_on = await asyncio.to_thread(replica.find_replica, settings)
    pipeline = Pipeline(
        home, load, settings, on_settled=on_settled, runs_on=runs_on, began_at=began_at
    )
    lane = pipeline.lane
    async with (
        health.serving(
            pipeline.metrics.registry,
            is_live=lambda: not lane.hangs(settings.stall_seconds),
            is_ready=lambda: pipeline.ready,
            host=settings.host,
            port=settings.port,
        ) as port,
        push.pushing(pipeline.metrics.registry, settings, job="imagefleet-worker"),
    ):
        log.info(
            "pulling from %s of %s, metrics at http://%s:%d/metrics",
            home.queue.name,
            home.url,
            settings.host,
            port,
            extra={"action": "start", "port": port},
        )
        await pipeline.run(stop, hurry)
    report = WorkerReport(
        images=pipeline.images_written,
        jobs=dict(pipeline.settler.outcomes),
        seconds=time.monotonic() - began_at,
        engine_busy_seconds=lane.clock.busy_seconds,
        engine_idle_fraction=lane.clock.idle_fraction,
        gpu_dollars=pipeline.cost.gpu_dollars,
        storage_dollars=pipeline.cost.storage_dollars,
    )
    log.info(
        "done: %d images in %.0f s, the engine waited %.1f %% of the time; jobs: %s",
        report.images,
        report.seconds,
        100 * report.engine_idle_fraction,
        ", ".join(f"{count} {outcome}" for outcome, count in report.jobs.items()) or "none",
        extra={"action": "stop"},
    )
    return report


def _load_engine(settings: WorkerSettings) -> contract.Engine:
    # Imported on the engine's thread: torch takes seconds to load, and the port answers meanwhile.
    from worker.engine.load import load_engine

    return load_engine(
        settings.model,
        settings.device,
        settings.max_batch,
        precision=settings.precision,
        config=settings.config,
        lora_cache_bytes=settings.lora_memory_megabytes * 2**20,
        kind=settings.engine,
        slots=settings.slots,
        compile=settings.compile,
        rank_capacity=settings.rank_capacity,
        fp16_accumulate=settings.fp16_accumulate,
        attention=settings.attention,
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

"""The parent of a machine's workers: a loop over one process for each GPU, without torch.

A worker that crashes is started again, after ever longer pauses. One that ends because its node or
its setup is wrong is not: the other GPUs go on. Each is the same command as the parent's, and finds
its GPU in its environment.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Gauge

from imagefleet import concurrency
from imagefleet.telemetry import metrics, probes, push
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict
from worker import tasks
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings, WorkerSettings

#: The exit codes of `imagefleet worker`, as `cli.console` has them.
DONE, UNEXPECTED, SETUP, NODE, JOBS_FAILED, INTERRUPTED, TERMINATED = (
    0,
    1,
    2,
    3,
    4,
    130,
    143,
)

#: A worker that ends so has done what it was told.
FINISHED = frozenset({DONE, JOBS_FAILED, INTERRUPTED, TERMINATED})

#: The first of them that a worker ended with is the parent's.
_BY_WEIGHT = (TERMINATED, INTERRUPTED, JOBS_FAILED, DONE, NODE, SETUP)

#: The first pause is short, since most crashes are chance; the longest costs little of an hour.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0

#: Crashes in a row before a GPU is left out; after this time of work, one is the first again.
MAX_CRASHES = 5
STEADY_SECONDS = 600.0

#: The parent's signals to its workers. A supervisor may send the first to all processes, so it
#: means the same however often it comes; Ctrl-C reaches the parent alone.
STOP = signal.SIGTERM
HURRY = signal.SIGINT

#: Names a worker's GPU and settings; not a setting, and not passed on.
VARIABLE = "_IMAGEFLEET_GPU"

#: The longest name of a worker.
_MAX_NAME = 128


async def run_workers(
    settings: MachineSettings, gpus: Sequence[Gpu], command: Sequence[str]
) -> int:
    """Runs a worker for each of *gpus* by *command*; returns the exit code of them all.

    Raises SetupError if the port is in use.
    """
    registry = metrics.LabelledRegistry({"fleet": settings.fleet_name})
    up = Gauge(
        "imagefleet_gpu_up",
        "1 if this GPU of several has a worker, 0 while it has none.",
        ["device"],
        registry=registry,
    )
    # Its reading end is every worker's standard input, which ends with the parent.
    lifeline, held_open = os.pipe()
    stop = asyncio.Event()
    workers = []
    for number, gpu in enumerate(gpus):
        assignment = json.dumps([gpu.name, _changes(settings, gpu, number, len(gpus))])
        variables = {**gpu.environment(len(gpus)), VARIABLE: assignment}
        is_up = up.labels(gpu.name)
        workers.append(_Worker(gpu.name, command, variables, lifeline, is_up, stop))

    def on_signal(number: signal.Signals) -> None:
        told = HURRY if stop.is_set() else STOP
        stop.set()
        for worker in workers:
            worker.tell(told)
        what = "hand back jobs in flight" if told is HURRY else "finish what has begun"
        log.info(f"{number.name}: the workers {what}", action="signal")

    def has_worker() -> bool:
        return any(worker.process is not None for worker in workers)

    try:
        with tasks.on_signals(on_signal):
            async with (
                probes.serving(
                    registry,
                    # One that ends is started again; the others' work must not end for it.
                    is_live=lambda: True,
                    is_ready=has_worker,
                    is_started=has_worker,
                    host=settings.host,
                    port=settings.port,
                ) as port,
                push.pushing(registry, settings, job="imagefleet-worker"),
            ):
                names = ", ".join(gpu.name for gpu in gpus)
                address = f"http://{probes.authority(settings.host, port)}/metrics"
                log.info(
                    f"starting workers on GPU {names}; which of them run is at {address},"
                    " each worker's metrics are on a port of its own",
                    action="start_workers",
                    port=port,
                )
                codes = await asyncio.gather(*(worker.keep() for worker in workers))
    finally:
        os.close(held_open)
        os.close(lifeline)
    if stop.is_set():  # by a signal that came before a worker could take it
        ended = TERMINATED if settings.until_empty else DONE
        codes = [ended if code < 0 else code for code in codes]
    return next((code for code in _BY_WEIGHT if code in codes), UNEXPECTED)


def assigned(settings: WorkerSettings) -> tuple[str, WorkerSettings] | None:
    """The GPU and settings of a parent's worker, which this process is; None: it has no parent.

    It hands its jobs back and ends when the parent does.
    """
    assignment = os.environ.pop(VARIABLE, None)
    if assignment is None:
        return None
    tasks.in_daemon_thread(_end_with_parent, "watch the parent")
    gpu, changes = json.loads(assignment)
    return gpu, settings.model_copy(update=changes)


def _end_with_parent() -> None:
    os.read(0, 1)  # the standard input, to which nothing is written
    log.error("the parent of this worker is gone", action="parent_gone")
    os.kill(os.getpid(), HURRY)


def _changes(settings: MachineSettings, gpu: Gpu, number: int, count: int) -> JSONDict:
    """The settings that a GPU's worker has in place of the machine's."""
    suffix = f"-gpu{gpu.name}"
    price = settings.price_per_hour
    return {
        "name": settings.name[: _MAX_NAME - len(suffix)] + suffix,
        "port": settings.port and settings.port + 1 + number,
        "price_per_hour": price and price / count,
        "device": "cpu" if settings.device == "cpu" else "cuda",
    }


@dataclass(eq=False)
class _Worker:
    """One GPU's worker process; started any number of times, one after the other."""

    gpu: str
    command: Sequence[str]
    variables: Mapping[str, str]
    standard_input: int
    is_up: Gauge
    stop: asyncio.Event
    process: asyncio.subprocess.Process | None = None

    async def keep(self) -> int:
        """Runs the process, again after a crash; returns the exit code that it ended with."""
        crashes = 0
        while True:
            began_at = time.monotonic()
            code = await self._run()
            if code in FINISHED or self.stop.is_set():
                return code
            is_steady = time.monotonic() - began_at >= STEADY_SECONDS
            crashes = 1 if is_steady else crashes + 1
            ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
            if code in {NODE, SETUP} or crashes > MAX_CRASHES:
                log.error(
                    f"GPU {self.gpu} is left out, others go on: its worker ended with {ended},"
                    " its own last line says why",
                    action="gpu_left_out",
                    gpu=self.gpu,
                    exit_code=code,
                )
                return code
            seconds = concurrency.backoff(
                crashes - 1, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
            )
            log.error(
                f"GPU {self.gpu}: the worker ended with {ended}; starting it again in"
                f" {seconds:.0f} s",
                action="worker_crashed",
                gpu=self.gpu,
                exit_code=code,
            )
            await tasks.first_of(self.stop.wait(), timeout_seconds=seconds)
            if self.stop.is_set():
                return code

    def tell(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _run(self) -> int:
        """Runs the process to its end; returns its exit code, or the negative of a signal."""
        self.process = process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=self.standard_input,
            env={**os.environ, **self.variables},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        log.info(
            f"the worker of GPU {self.gpu} is process {process.pid}",
            action="worker_started",
            gpu=self.gpu,
            process_id=process.pid,
        )
        if self.stop.is_set():  # before there was the process
            self.tell(STOP)
        self.is_up.set(1)
        code = await process.wait()
        self.is_up.set(0)
        self.process = None
        return code

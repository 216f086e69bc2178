"""The parent of a machine's workers, one for each GPU: starts them, and ends when they have ended.

A worker that crashes is started again, after ever longer pauses. One that ends because its node or
its setup is wrong is not: the other GPUs go on. The parent imports no torch and uses no GPU.
"""

import asyncio
import signal
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from imagefleet import concurrency, errors
from imagefleet.telemetry import logs, metrics, probes, push
from worker import replica, tasks
from worker.gpus.child import HURRY, STOP, Assignment, Child
from worker.gpus.choice import Gpu
from worker.settings import MachineSettings

log = logs.EventLog(__name__)

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
_BY_WEIGHT = (JOBS_FAILED, DONE, NODE, SETUP)

#: The first pause is short, since most crashes are chance; the longest costs little of an hour.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0

#: Crashes in a row before a GPU is left out; after this time of work, one is the first again.
MAX_CRASHES = 5
STEADY_SECONDS = 600.0

#: Seconds between two probes of a worker.
PROBE_SECONDS = 1.0

#: The time after the grace time in which a worker hands back jobs and records suspect images, which
#: takes a minute and a half at most.
LAST_SECONDS = 90.0

#: Tries to kill what has not ended by then, at intervals of `PROBE_SECONDS`.
KILLS = 30

#: The longest name of a worker.
_MAX_NAME = 128


async def run_workers(
    settings: MachineSettings, gpus: Sequence[Gpu], command: Sequence[str]
) -> int:
    """Runs a worker for each of *gpus* by *command*; returns the exit code of them all.

    Raises SetupError if the port is in use, NodeError if a worker cannot be ended.
    """
    return await _Parent(settings, gpus, command).run()


class _Parent:
    def __init__(
        self, settings: MachineSettings, gpus: Sequence[Gpu], command: Sequence[str]
    ) -> None:
        runs_on = replica.find_replica(settings)
        price = runs_on.dollars_per_hour
        if settings.price_per_hour is not None:  # of the machine
            price = settings.price_per_hour / len(gpus)
        self._settings = settings
        self._instance = push.new_instance()
        self._metrics = MachineMetrics(
            settings.fleet_name, [each.name for each in gpus], price
        )
        self._codes: list[int] = []
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._stopped_by: signal.Signals | None = None
        self._children = [
            Child(
                gpu,
                command,
                gpu.environment(len(gpus)),
                Assignment(
                    control=-1,
                    gpu=gpu.name,
                    name=_name(settings.name, gpu),
                    instance=self._instance,
                    port=settings.port and settings.port + 1 + number,
                    price_per_hour=price,
                ),
            )
            for number, gpu in enumerate(gpus)
        ]

    async def run(self) -> int:
        settings = self._settings
        with tasks.on_signals(self._on_signal):
            async with (
                probes.serving(
                    self._metrics.registry,
                    # A worker that hangs is started again; the others' work must not end for it.
                    is_live=lambda: True,
                    is_ready=lambda: any(each.is_ready for each in self._children),
                    is_started=lambda: any(each.is_ready for each in self._children),
                    host=settings.host,
                    port=settings.port,
                ) as port,
                push.pushing(
                    self._metrics.registry,
                    settings,
                    job="imagefleet-worker",
                    instance=self._instance,
                ),
            ):
                names = ", ".join(child.gpu.name for child in self._children)
                address = f"http://{probes.authority(settings.host, port)}/metrics"
                log.info(
                    f"starting workers on GPU {names}; the machine's metrics are at"
                    f" {address}, each worker's on a port of its own",
                    action="start_workers",
                    port=port,
                )
                try:
                    await self._run_children()
                finally:
                    for child in self._children:
                        child.kill()
        return self._exit_code()

    async def _run_children(self) -> None:
        side_tasks = tasks.SideTasks()
        side_tasks.start("watch workers", self._watch())
        side_tasks.start("stop workers", self._pass_on())
        keeping = asyncio.gather(*map(self._keep, self._children))
        try:
            await tasks.first_of(keeping, side_tasks.watch())
        finally:
            await side_tasks.cancel()

    async def _keep(self, child: Child) -> None:
        """Runs the worker of one GPU, again after a crash, until there is a reason to end."""
        crashes = 0
        gpu = child.gpu.name
        while True:
            began_at = time.monotonic()
            self._metrics.is_up(gpu)
            code = await child.run()
            self._metrics.is_down(gpu)
            if code in FINISHED or self._stop.is_set():
                self._codes.append(code)
                return
            if code in {NODE, SETUP}:
                self._leave_out(gpu, code, "its own last line says why")
                return
            crashes = (
                1 if time.monotonic() - began_at >= STEADY_SECONDS else crashes + 1
            )
            if crashes > MAX_CRASHES:
                self._leave_out(gpu, code, f"it crashed {crashes} times in a row")
                return
            seconds = concurrency.backoff(
                crashes - 1, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
            )
            log.error(
                f"GPU {gpu}: {_words(code)}; starting it again in {seconds:.0f} s",
                action="worker_crashed",
                gpu=gpu,
                exit_code=code,
            )
            await tasks.first_of(self._stop.wait(), timeout_seconds=seconds)
            if self._stop.is_set() or self._is_queue_empty():
                self._codes.append(code)
                return
            self._metrics.restarts.labels(gpu).inc()

    def _is_queue_empty(self) -> bool:
        """True once a worker has found nothing left, not even a lease of a dead worker."""
        return self._settings.until_empty and not {DONE, JOBS_FAILED}.isdisjoint(
            self._codes
        )

    def _leave_out(self, gpu: str, code: int, why: str) -> None:
        self._codes.append(code)
        left = len(self._children) - len(self._codes)
        go_on = f"{left} of {len(self._children)} go on"
        log.error(
            f"GPU {gpu} is left out, {go_on}: its worker ended with {_words(code)},"
            f" {why}",
            action="gpu_left_out",
            gpu=gpu,
            exit_code=code,
        )

    def _exit_code(self) -> int:
        """The code of workers that did what they were told, else the class of what ended them."""
        codes = set(self._codes)
        if (
            self._settings.until_empty
            and self._stop.is_set()
            and codes.difference(_BY_WEIGHT)
        ):
            return INTERRUPTED if self._stopped_by is signal.SIGINT else TERMINATED
        found = next((code for code in _BY_WEIGHT if code in codes), UNEXPECTED)
        # A signal that came before the worker could take it.
        is_stopped = codes <= {-signal.SIGTERM, -signal.SIGINT}
        return DONE if self._stop.is_set() and is_stopped else found

    async def _pass_on(self) -> None:
        await self._stop.wait()
        for child in self._children:
            child.tell(STOP)
        seconds = self._settings.grace_seconds + LAST_SECONDS
        await tasks.first_of(self._hurry.wait(), timeout_seconds=seconds)
        for child in self._children:
            child.tell(HURRY)
        await asyncio.sleep(LAST_SECONDS)
        for _ in range(KILLS):
            for child in self._children:
                child.kill()
            await asyncio.sleep(PROBE_SECONDS)  # `_keep` sees them end
        left = ", ".join(each.gpu.name for each in self._children if each.is_running)
        raise errors.NodeError(
            f"the worker of GPU {left} does not even end when it is killed: the driver hangs;"
            " restart the machine"
        )

    async def _watch(self) -> None:
        while True:
            for child in self._children:
                if child.kill_if_hung():
                    self._metrics.is_down(child.gpu.name)
            await asyncio.sleep(PROBE_SECONDS)

    def _on_signal(self, number: signal.Signals) -> None:
        self._stopped_by = self._stopped_by or number
        (self._hurry if self._stop.is_set() else self._stop).set()
        what = (
            "hand back jobs in flight"
            if self._hurry.is_set()
            else "finish what has begun"
        )
        log.info(f"{number.name}: the workers {what}", action="signal")


def _name(machine: str, gpu: Gpu) -> str:
    """The name of a GPU's worker, by which it can be quarantined."""
    suffix = f"-gpu{gpu.name}"
    return machine[: _MAX_NAME - len(suffix)] + suffix


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class MachineMetrics(Collector):
    """The GPUs without a worker: the machine is billed for them all the same.

    A worker counts its own cost, so that the two add up to the machine's.
    """

    def __init__(
        self, fleet: str, gpus: Iterable[str], price_per_hour: float | None
    ) -> None:
        """*price_per_hour*: of one GPU, in dollars; None: not known."""
        self.registry = metrics.LabelledRegistry({"fleet": fleet})
        self.registry.register(self)
        self.restarts = Counter(
            "imagefleet_gpu_restarts",
            "Workers started again after a crash, by GPU.",
            ["device"],
            registry=self.registry,
        )
        self._price = price_per_hour
        self._down_since: dict[str, float | None] = dict.fromkeys(
            gpus, time.monotonic()
        )
        self._down_seconds = 0.0  # of those that are up again
        for gpu in self._down_since:
            self.restarts.labels(gpu)

    def is_up(self, gpu: str) -> None:
        since = self._down_since[gpu]
        if since is not None:
            self._down_seconds += time.monotonic() - since
        self._down_since[gpu] = None

    def is_down(self, gpu: str) -> None:
        if self._down_since[gpu] is None:
            self._down_since[gpu] = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "imagefleet_gpu_up",
            "1 if this GPU of several has a worker, 0 while it has none.",
            labels=["device"],
        )
        for gpu, since in self._down_since.items():
            up.add_metric([gpu], float(since is None))
        yield up
        if self._price is None:
            return
        down = [since for since in self._down_since.values() if since is not None]
        now = time.monotonic()
        seconds = self._down_seconds + sum(now - since for since in down)
        for name, label, value in (
            ("imagefleet_cost_dollars", "kind", "gpu"),
            ("imagefleet_wasted_dollars", "reason", "down"),
        ):
            family = CounterMetricFamily(
                name, "Cost of GPUs without a worker.", labels=[label]
            )
            family.add_metric([value], seconds / 3600 * self._price)
            yield family
        yield GaugeMetricFamily(
            "imagefleet_price_dollars_per_hour",
            "Price of the GPUs without a worker.",
            value=len(down) * self._price,
        )

"""A worker's change of models: chosen, prepared beside the work, and measured.

The rule:

1. It stays while its own model's queues have jobs, for `stay_seconds` at least: 15 times as long as
   the longest change so far took, half a minute to a quarter of an hour. So where every queue is
   always full, changes take a sixteenth of the time at most.
2. Then, or as soon as its own queues are empty, it takes the model that has waited longest: since
   its oldest job was sent, or since this worker left it, whichever is later. So it takes turns.

So of N models, none waits longer for this worker than N times (`stay_seconds` and one change).

A worker begins with a model by chance, each as likely as is its share of the waiting jobs: so
workers that start together begin with different ones.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from imagefleet import concurrency
from imagefleet.errors import FleetError, NodeError, SetupError, TransientError
from imagefleet.storage.routing.models import SERVED_SPAN, ModelQueues
from imagefleet.storage.routing.queue import RoutedQueue
from imagefleet.telemetry import host
from imagefleet.telemetry.logs import log
from worker import tasks
from worker.engine.contract import Engine
from worker.files import model as model_files
from worker.gpu_thread import THREAD_NAME, Take
from worker.metrics import WorkerMetrics
from worker.models.checkpoints import Checkpoint
from worker.pull import Puller

#: Seconds between two looks at other models' queues, three to six operations on Azure. An
#: idle worker's pause doubles up to the longest.
LOOK_SECONDS = 30.0
IDLE_LOOK_SECONDS = 1.0
LONGEST_IDLE_LOOK_SECONDS = 10.0

#: Free memory of the host that another model's weights need, in sizes of its file.
_MEMORY_PER_FILE = 2

STAY_PER_CHANGE = 15.0
SHORTEST_STAY_SECONDS = 30.0
LONGEST_STAY_SECONDS = 900.0


@dataclass(frozen=True)
class Waiting:
    """The jobs of one model that nobody has; *age_seconds* is of the oldest."""

    jobs: int
    age_seconds: float


@dataclass
class ModelChoice:
    """Decides by the rule above; *clock* in seconds."""

    current: str
    clock: Callable[[], float] = time.monotonic
    longest_change_seconds: float = 0.0
    _since: float = field(init=False)
    _left_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @property
    def stay_seconds(self) -> float:
        wanted = STAY_PER_CHANGE * self.longest_change_seconds
        return min(max(wanted, SHORTEST_STAY_SECONDS), LONGEST_STAY_SECONDS)

    def changed(self, model: str, change_seconds: float) -> None:
        """The worker serves *model* from now on; nothing was drawn for *change_seconds*."""
        self._left_at[self.current] = self.clock() - change_seconds
        self.current = model
        self._since = self.clock()
        self.longest_change_seconds = max(self.longest_change_seconds, change_seconds)

    @property
    def may_leave(self) -> bool:
        """True once it has stayed long enough to leave jobs behind."""
        return self.clock() - self._since >= self.stay_seconds

    def following(self, waiting: Mapping[str, Waiting], *, is_idle: bool) -> str | None:
        """The model to change to; None: stay. *is_idle*: there are no jobs of the present one."""
        if not (is_idle or self.may_leave):
            return None
        now = self.clock()
        waited = {
            model: min(each.age_seconds, now - self._left_at.get(model, -math.inf))
            for model, each in waiting.items()
            if model != self.current and each.jobs
        }
        return max(waited, key=lambda model: waited[model], default=None)


@dataclass(frozen=True)
class Following:
    """The model to change to, prepared at *prepared_at* (monotonic seconds)."""

    checkpoint: Checkpoint
    #: Gives the engine the model in place of a new one, if it can: what is compiled is kept.
    take: Take | None
    prepared_at: float


@dataclass(eq=False)
class WorkerModels:
    """The models of one worker, and which of them it serves now.

    *fetch* brings a model to this machine; *load* loads it, on any thread. *read* reads its weights
    into the host's memory for the engine that *load* returned last.
    """

    checkpoints: InitVar[Sequence[Checkpoint]]
    _fetch: Callable[[Checkpoint], Coroutine[Any, Any, Checkpoint]]
    load: Callable[[Checkpoint], Engine]
    read: Callable[[Checkpoint], Take | None] = lambda _: None

    def __post_init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.current = checkpoints[0]
        self._default = checkpoints[0].name
        self._checkpoints = {each.name: each for each in checkpoints}
        self._choice = ModelChoice(self.current.name)
        self._loop = asyncio.get_running_loop()

    @property
    def names(self) -> list[str]:
        return list(self._checkpoints)

    def served_now(self) -> set[str | None]:
        """The models whose jobs the engine draws; None: of jobs without one."""
        return self._asked_for(self.current.name)

    def _asked_for(self, name: str) -> set[str | None]:
        return {name, None} if name == self._default else {name}

    async def begin(self, queue: RoutedQueue) -> None:
        """Fetches the model to begin with.

        Raises SetupError or TransientError if the model of jobs without one cannot be fetched.
        """
        chosen = self.current
        if len(self._checkpoints) > 1:
            waiting = await self._measured(queue)
            jobs = [each.jobs for each in waiting.values()]
            if any(jobs):
                (name,) = random.choices(list(waiting), jobs)  # noqa: S311 - no secret
                chosen = self._checkpoints[name]
                log.info(
                    f"{waiting[name].jobs} jobs wait for {name}: beginning with it",
                    action="first_model",
                    model=name,
                )
        try:
            fetched = await self._fetch(chosen)
        except (SetupError, NodeError) as error:
            if chosen is self.current:
                raise
            self._forget(chosen, error)
            fetched = await self._fetch(self.current)
        self._set_current(fetched)

    def _set_current(self, checkpoint: Checkpoint) -> None:
        self.current = self._checkpoints[checkpoint.name] = checkpoint
        self._choice = ModelChoice(checkpoint.name)

    def load_current(self) -> Engine:
        """Loads the current model, or the default if it cannot be; on the engine's thread."""
        try:
            return self.load(self.current)
        except (SetupError, NodeError) as error:
            if self.current.name == self._default:
                raise
            self._forget(self.current, error)
        default = self._fetch(self._checkpoints[self._default])
        self._set_current(
            asyncio.run_coroutine_threadsafe(default, self._loop).result()
        )
        return self.load(self.current)

    async def following(self, puller: Puller) -> Following:
        """Waits until another model is to be served, and has been prepared."""
        while True:
            checkpoint = await self._choose(puller)
            name = checkpoint.name
            log.info(
                f"the model {name} is next: its jobs have waited longest",
                action="model_chosen",
                model=name,
            )
            try:
                take = await self.prepare(checkpoint)
                return Following(self._checkpoints[name], take, time.monotonic())
            except TransientError as error:
                log.warning(
                    f"the model {name} is not there: {error}",
                    action="model_not_fetched",
                    model=name,
                )
            except (SetupError, NodeError, OSError) as error:
                self.drop(checkpoint, error, puller.queue)

    async def _choose(self, puller: Puller) -> Checkpoint:
        looked_at = time.monotonic()
        idle_looks = 0
        while True:
            await asyncio.sleep(concurrency.jitter(IDLE_LOOK_SECONDS))
            idle_looks = idle_looks if puller.is_idle else 0
            seconds = time.monotonic() - looked_at
            is_due = seconds >= LOOK_SECONDS and self._choice.may_leave
            pause = concurrency.backoff(
                idle_looks, IDLE_LOOK_SECONDS / 2, LONGEST_IDLE_LOOK_SECONDS, low=1
            )
            is_idle_due = puller.is_idle and seconds >= pause
            if not (is_idle_due or is_due):
                continue
            looked_at = time.monotonic()
            idle_looks += 1
            waiting = await self._measured(puller.queue)
            if name := self._choice.following(waiting, is_idle=puller.is_idle):
                return self._checkpoints[name]

    async def _measured(self, queue: RoutedQueue) -> dict[str, Waiting]:
        """Depth of each model's queues; empty where they cannot be measured."""
        try:
            return {
                name: await self._waiting(queue, name) for name in self._checkpoints
            }
        except FleetError as error:
            log.debug(f"the models' queues cannot be measured: {error}")
            return {}

    async def _waiting(self, queue: RoutedQueue, name: str) -> Waiting:
        depth = await queue.depth_of(self._asked_for(name))
        if depth.oldest_age_seconds is None:  # none is visible
            return Waiting(0, 0.0)
        return Waiting(depth.messages - (depth.leased or 0), depth.oldest_age_seconds)

    async def prepare(self, checkpoint: Checkpoint) -> Take | None:
        """Reads a model's weights beside the engine in use, where the memory allows it.

        A second engine beside the first on a GPU would get fewer slots for good.
        """
        checkpoint = self._checkpoints[checkpoint.name] = await self._fetch(checkpoint)
        size = await asyncio.to_thread(
            _file_bytes, model_files.local_path(checkpoint.settings)
        )
        if host.free_memory_bytes() < _MEMORY_PER_FILE * size:
            return None
        # By this name the console knows that it must not wait for torch at its end.
        read = tasks.in_daemon_thread(lambda: self.read(checkpoint), THREAD_NAME)
        return await asyncio.wrap_future(read)

    def changed(self, seconds: float, metrics: WorkerMetrics) -> None:
        """The engine has the current model now, after so many seconds without one."""
        name = self.current.name
        before = self._choice.current
        if name == before:
            return  # the other could not be loaded
        self._choice.changed(name, seconds)
        metrics.model_switches.labels(name).inc()
        metrics.model_switch_seconds.inc(seconds)
        log.info(
            f"the model {name} is loaded in place of {before}, in {seconds:.1f} s",
            action="model_switched",
            seconds=round(seconds, 3),
            model=name,
        )

    def drop(
        self, checkpoint: Checkpoint, error: Exception, queue: RoutedQueue
    ) -> None:
        """Stops serving a model that failed to load; its jobs are left to other workers."""
        self._forget(checkpoint, error)
        queue.remove(checkpoint.name)

    def _forget(self, checkpoint: Checkpoint, error: Exception) -> None:
        name = checkpoint.name
        log.error(
            f"the model {name} is not served here: {error}",
            action="model_unusable",
            model=name,
        )
        del self._checkpoints[name]


async def note_served(
    models: ModelQueues,
    names: Callable[[], Sequence[str]],
    held: Callable[[], Awaitable[tuple[str, Mapping[str, object]]]],
) -> NoReturn:
    """Side task: tells `status` which models have a worker.

    *held*: the model that draws now, and what lists tell of it.
    """
    while True:
        try:
            for name in names():
                await models.note_served(name)
            await models.note_held(*await held())
        except FleetError as error:
            log.debug(f"which models are served cannot be noted: {error}")
        await asyncio.sleep(concurrency.jitter(SERVED_SPAN.total_seconds() / 2))


async def make_queues(models: ModelQueues, names: Sequence[str]) -> None:
    """Makes the queues of models, as far as the credentials allow and the storage answers."""
    try:
        for name in names:
            await models.make(name)
    except (SetupError, TransientError) as error:
        log.info(
            f"the queues of models are not made: {error.message}",
            action="queues_not_made",
        )


def _file_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())

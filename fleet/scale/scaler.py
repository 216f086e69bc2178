"""Samples the queue and the fleet every minute, and sets the replicas every 15 minutes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path

from fleet.monitor import prometheus, rates
from fleet.salad import deployment
from fleet.salad import groups as salad_groups
from fleet.salad.file import Model
from fleet.salad.gpus import GpuClass
from fleet.salad.groups import Groups
from fleet.scale import ledger
from fleet.scale.decision import (
    SETTLE_SECONDS,
    UNWATCHED_SECONDS,
    Decision,
    Goal,
    Known,
    decide,
)
from imagefleet import concurrency
from imagefleet.errors import SetupError, TransientError
from imagefleet.pricing import families
from imagefleet.storage.open import Storage
from imagefleet.telemetry import host
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict


@dataclass(frozen=True)
class Speed:
    """Jobs/s of one replica on the fleet's first model, and the source of that number."""

    jobs_per_second: float
    source: str


@dataclass(eq=False, kw_only=True)
class Speeds:
    """The best known speed, and what a job of each model counts; *server* has the metrics."""

    given: Speed | None = None
    #: The one assumed, until one is measured.
    last: Speed | None = None
    server: prometheus.Prometheus | None = None
    models: Sequence[Model] = ()

    def __post_init__(self) -> None:
        first = self.models[0].family if self.models else families.SD1
        self._weights = {
            model.name: first.images_per_second(1) / model.family.images_per_second(1)
            for model in self.models
        }

    def jobs_of_first(self, jobs: Iterable[tuple[str | None, float]]) -> float:
        """The *jobs* of models in jobs of the fleet's first one, as which unknown ones count."""
        return sum(count * self._weights.get(model or "", 1.0) for model, count in jobs)

    async def find(self) -> Speed:
        """The given speed, else the last measured, else the assumed; raises SetupError if none."""
        if self.given:
            return self.given
        self.last = await self._measured() or self.last
        if self.last is None:
            raise SetupError(
                "the speed of a replica is unknown: give --images-per-second, or --prometheus once"
                " workers run"
            )
        return self.last

    async def _measured(self) -> Speed | None:
        by_model = await rates.ask(self.server, rates.replica_jobs_per_second) or {}
        speed = self.jobs_of_first(by_model.items())
        return Speed(speed, "measured by the metrics") if speed else None


@dataclass(eq=False)
class Scaler:
    """Scales one fleet by its queue and its budget."""

    _goal: Goal
    _fleet: deployment.Deployment
    _storage: Storage
    _ledger_path: Path
    _speeds: Speeds
    _: KW_ONLY
    is_dry_run: bool = False
    #: Clock of the cost ledger, which no change of the system time moves; not configurable.
    clock: Callable[[], float] = field(default_factory=host.steady_clock)
    #: Wall clock that the deadline is compared with.
    wall_clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._ledger = ledger.read(self._ledger_path, self._fleet.fleet, self.clock())
        self._classes: Sequence[GpuClass] = ()
        self._quota_free: int | None = None
        self._messages = 0
        self._jobs_of_first = 0.0
        self._empty_since: float | None = None
        self._due_at = self.clock()
        self._known: Known | None = None

    @property
    def running(self) -> int:
        """Workers that are billed, as of the last sample."""
        return self._ledger.running

    @property
    def is_finished(self) -> bool:
        """True if the queue has been empty for long enough and no worker runs."""
        known = self._known
        is_empty = known is not None and known.empty_seconds >= SETTLE_SECONDS
        return is_empty and not self.running

    async def run(
        self, on_decision: Callable[[JSONDict], None], until_empty: bool
    ) -> None:
        """Samples and decides for ever, or *until_empty*; a failure leaves the replicas."""
        while True:
            await self.try_once(on_decision)
            if until_empty and self.is_finished:
                break
            await asyncio.sleep(self._goal.sample_seconds)
        log.info("the queue is empty and no worker runs", action="scale_done")

    async def try_once(self, on_decision: Callable[[JSONDict], None]) -> None:
        """One step; after a failure the replicas stay, but the first one's SetupError is raised."""

        async def decide_once() -> None:
            on_decision(await self.step())

        await self._failure(decide_once(), "the replicas stay unchanged")

    async def _failure(self, work: Awaitable[None], said: str) -> str:
        """Does *work*; if it fails, logs and returns what is *said*. Raises a first SetupError."""
        try:
            await work
        except (TransientError, SetupError) as error:
            if isinstance(error, SetupError) and self._known is None:
                raise
            log.warning(f"{said}: {error}", action="scale_failed")
            return said
        return ""

    async def step(self) -> JSONDict:
        """Samples, decides, acts, and returns the record; raises TransientError in an outage.

        What cannot be read or written is an obstacle to more replicas; the budget is watched all
        the same.
        """
        now = self.clock()
        is_due = now >= self._due_at
        groups = await self._fleet.existing_groups()
        obstacle = ""
        if salad_groups.is_rolling(groups):
            obstacle = "a rolling change is under way"
        self._quota_free = None
        if is_due:
            obstacle = (
                await self._failure(
                    self._read_prices(), "SaladCloud's prices and quota are unknown"
                )
                or obstacle
            )
        obstacle = (
            await self._failure(self._read_queue(now), "the queue does not answer")
            or obstacle
        )
        running = sum(group.running for group in groups)
        counted = self._ledger.counted(now, running, self._price(groups))
        if counted.end < now + UNWATCHED_SECONDS / 2:
            counted = replace(counted, end=(now + UNWATCHED_SECONDS) // 60 * 60)
        self._ledger = counted
        obstacle = (
            await self._failure(self._write_ledger(), "the ledger cannot be written")
            or obstacle
        )
        speed = await self._speeds.find()
        per_job = self._jobs_of_first / self._messages if self._messages else 1.0
        known = Known(
            now=self.wall_clock(),
            messages=self._messages,
            empty_seconds=0.0 if self._empty_since is None else now - self._empty_since,
            replicas=sum(group.live_replicas for group in groups),
            running=running,
            spent_dollars=self._ledger.dollars,
            price=self._ledger.price,
            quota_free=self._quota_free,
            jobs_per_second=speed.jobs_per_second / per_job,
        )
        self._known = known
        room = len(groups) * salad_groups.MAX_REPLICAS
        goal = replace(self._goal, max_replicas=min(self._goal.max_replicas, room))
        decision = decide(goal, known, is_due=is_due and not obstacle)
        if obstacle and decision.replicas == known.replicas:
            decision = Decision(known.replicas, obstacle)
        await self._carry_out(decision, known, groups, is_due=is_due)
        # A failed or blocked change stays due for the next sample.
        if is_due and not obstacle:
            self._due_at = now + self._goal.every_seconds
        return {
            **asdict(known),
            "speed": speed.source,
            "wanted": decision.replicas,
            "reason": decision.reason,
        }

    async def _write_ledger(self) -> None:
        if not self.is_dry_run:
            ledger.write(self._ledger_path, self._ledger)

    async def _read_prices(self) -> None:
        """Reads the prices of the GPU classes and the quota; in an outage, earlier prices stay."""
        self._classes, quota = await concurrency.gather(
            self._fleet.client.gpu_classes(), self._fleet.client.quota()
        )
        self._quota_free = quota.free

    async def _read_queue(self, now: float) -> None:
        empty_since = self._empty_since
        self._empty_since = None
        depth = await self._storage.queue.depth()
        counted = [
            (queue.model, queue.messages)
            for queue in depth.by_queue.values()
            if self._goal.models is None
            or queue.model is None
            or queue.model in self._goal.models
        ]
        self._messages = sum(messages for _, messages in counted)
        self._jobs_of_first = self._speeds.jobs_of_first(counted)
        if not self._messages:
            self._empty_since = empty_since or now

    async def _carry_out(
        self, decision: Decision, known: Known, groups: Groups, *, is_due: bool
    ) -> None:
        is_late = known.messages and self._goal.has_passed(known.now)
        level = logging.WARNING if is_late else logging.INFO
        now = known.replicas
        then = decision.replicas
        spent = f"${known.spent_dollars:,.2f} of ${self._goal.max_dollars:,.2f} spent"
        doing = "would scale" if self.is_dry_run else "scaling"
        text = f"{doing} from {now} to {then} replicas"
        if then == now:
            level = level if is_due else logging.DEBUG
            text = f"keeping {now} replicas"
        text = f"{text}: {decision.reason}; {spent}"
        log.log(level, text, action="scale", replicas=then, before=now)
        if self.is_dry_run:
            return
        # Before there are more: what grows has an end of its own.
        schedule = time.strftime("%-M %-H %-d %-m *", time.gmtime(self._ledger.end))
        try:
            await self._fleet.end_by(groups, schedule)
        except SetupError as error:
            log.warning(f"SaladCloud sets no end: {error}", action="scale_endless")
        if then != now:
            live = {group.name: group.live_replicas for group in groups}
            await self._fleet.resize(groups, salad_groups.resplit(live, then))

    def _price(self, groups: Groups) -> float | None:
        """$/h of a replica of the most expensive class; None if that of a group is unknown."""
        found = [group.price(self._classes) for group in groups]
        highest = [price.most if price else 0.0 for price in found]
        return max(highest) if min(highest) > 0 else None

"""Looks at the queue and at the fleet each minute, and sets the replicas each quarter-hour."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fleet import prometheus, rates, salad_deployment, salad_groups, salad_price, scale_ledger
from fleet.salad_gpus import GpuClass
from fleet.salad_records import Group
from fleet.scale_decision import SETTLE_SECONDS, Decision, Goal, Known, decide
from jobs import errors
from jobs.storage import Storage

log = logging.getLogger(__name__)

#: The queue's own fall tells a speed once this much work was done: ten replicas' minute.
_MEASURED_REPLICA_SECONDS = 600.0

#: Looks that the queue's fall is measured over: half an hour of them.
_LOOKS = 30


@dataclass(frozen=True, slots=True)
class Speed:
    """Jobs a second of one replica, and where that comes from."""

    jobs_per_second: float
    source: str


class QueueSpeed:
    """What a replica does at least, by how fast the queue becomes shorter."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, float]] = deque(maxlen=_LOOKS)

    def look(self, at: float, messages: int, running: int) -> None:
        before_at, _, worked = self._looks[-1] if self._looks else (at, 0, 0.0)
        self._looks.append((at, messages, worked + running * (at - before_at)))

    @property
    def jobs_per_second(self) -> float | None:
        """None while it has not been measured, or more jobs come in than are done."""
        if not self._looks:
            return None
        (_, first, before), (_, last, after) = self._looks[0], self._looks[-1]
        if after - before < _MEASURED_REPLICA_SECONDS or last >= first:
            return None
        return (first - last) / (after - before)


class Scaler:
    """One fleet's replicas, by its queue and its dollars."""

    def __init__(
        self,
        goal: Goal,
        fleet: salad_deployment.Deployment,
        home: Storage,
        ledger_path: Path,
        *,
        given_speed: Speed | None = None,
        assumed_speed: Speed | None = None,
        server: prometheus.Prometheus | None = None,
        is_dry_run: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._goal = goal
        self._fleet = fleet
        self._home = home
        self._ledger_path = ledger_path
        self._given_speed = given_speed
        self._assumed_speed = assumed_speed
        self._server = server
        self._is_dry_run = is_dry_run
        self._clock = clock
        self._ledger = scale_ledger.read(ledger_path, fleet.fleet, clock())
        self._queue_speed = QueueSpeed()
        self._classes: Sequence[GpuClass] = ()
        self._empty_since: float | None = None
        self._empty_seconds = 0.0
        self._due_at = clock()
        self._has_looked = False

    @property
    def running(self) -> int:
        """Workers that are billed, as of the last look."""
        return self._ledger.running

    @property
    def is_finished(self) -> bool:
        """Nothing waits, for long enough to be sure, and nothing runs."""
        return self._empty_seconds >= SETTLE_SECONDS and self.running == 0

    async def run(self, on_decision: Callable[[dict[str, Any]], None]) -> None:
        """Decides for ever; what fails is logged, leaves the replicas and is tried again."""
        while True:
            await self.try_once(on_decision)
            await asyncio.sleep(self._goal.look_seconds)

    async def try_once(self, on_decision: Callable[[dict[str, Any]], None]) -> None:
        """One look, and what follows from it; from an outage, nothing follows.

        Raises:
            SetupError: the very first look is refused; later on, that is outlived, too.
        """
        try:
            on_decision(await self.step())
        except (errors.TransientError, errors.SetupError) as error:
            if isinstance(error, errors.SetupError) and not self._has_looked:
                raise
            log.warning(
                "the replicas stay as they are: %s", error, extra={"action": "scale_look_failed"}
            )

    async def step(self) -> dict[str, Any]:
        """One look, its decision carried out, and its record.

        Raises:
            TransientError: queue or SaladCloud do not answer.
        """
        now = self._clock()
        is_due = now >= self._due_at
        groups, depth = await asyncio.gather(self._fleet.groups(), self._home.queue.depth())
        if not groups:
            raise errors.SetupError("there are no groups to scale: `imagefleet deploy salad apply`")
        price = await self._price(groups, is_due=is_due)
        running = sum(group.running for group in groups)
        self._count(now, running, price)
        if depth.messages:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        self._empty_seconds = 0.0 if self._empty_since is None else now - self._empty_since
        self._queue_speed.look(now, depth.messages, running)
        speed = await self._speed()
        known = Known(
            now=now,
            messages=depth.messages,
            empty_seconds=self._empty_seconds,
            replicas=sum(group.replicas for group in groups if not group.is_stopped),
            running=running,
            spent_dollars=self._ledger.dollars,
            price=self._ledger.price,
            quota_free=await self._quota_free() if is_due else None,
            jobs_per_second=speed.jobs_per_second,
        )
        self._has_looked = True
        room = len(groups) * salad_groups.MAX_REPLICAS
        goal = replace(self._goal, max_replicas=min(self._goal.max_replicas, room))
        decision = decide(goal, known, is_due=is_due)
        if decision.replicas and salad_deployment.is_rolling(groups):
            decision = Decision(known.replicas, "a rolling change is under way")
        await self._carry_out(decision, known, groups, is_due=is_due)
        # Only what was carried out is done for this quarter-hour.
        if is_due:
            self._due_at = now + self._goal.every_seconds
        return {
            **asdict(known),
            "speed": speed.source,
            "wanted": decision.replicas,
            "reason": decision.reason,
        }

    async def _carry_out(
        self, decision: Decision, known: Known, groups: Sequence[Group], *, is_due: bool
    ) -> None:
        if decision.replicas == known.replicas:
            log.log(
                logging.INFO if is_due else logging.DEBUG,
                "%d replicas stay: %s",
                known.replicas,
                decision.reason,
                extra={"action": "scale_keep", "replicas": known.replicas},
            )
            return
        log.info(
            "%s from %d to %d replicas: %s; $%.2f of $%.2f spent",
            "would go" if self._is_dry_run else "going",
            known.replicas,
            decision.replicas,
            decision.reason,
            known.spent_dollars,
            self._goal.max_dollars,
            extra={"action": "scale", "replicas": decision.replicas, "before": known.replicas},
        )
        if self._is_dry_run:
            return
        await self._fleet.scale(decision.replicas, groups)

    def _count(self, now: float, running: int, price: float | None) -> None:
        self._ledger = self._ledger.counted(now, running, price)
        if not self._is_dry_run:
            scale_ledger.write(self._ledger_path, self._ledger)

    async def _price(self, groups: Sequence[Group], *, is_due: bool) -> float | None:
        """Of the dearest class that a replica may get; the last that SaladCloud told."""
        if is_due or not self._classes:
            try:
                self._classes = await self._fleet.api.gpu_classes()
            except errors.TransientError as error:
                log.warning("at the last prices: %s", error, extra={"action": "prices_unknown"})
        found = [salad_price.of_group(group, self._classes) for group in groups]
        most = [each.most if each else 0.0 for each in found]
        # One group without a price, or at none, leaves the whole fleet's unknown.
        return max(most) if most and min(most) > 0 else None

    async def _quota_free(self) -> int | None:
        try:
            return (await self._fleet.api.quota()).free
        except errors.TransientError as error:
            log.warning("without the quota: %s", error, extra={"action": "quota_unknown"})
            return None

    async def _speed(self) -> Speed:
        """As given, else as measured, else as assumed.

        Raises:
            SetupError: nothing tells it.
        """
        if self._given_speed:
            return self._given_speed
        if self._server is not None:
            try:
                fleet = await rates.fleet_rates(self._server)
            except errors.FleetError as error:
                log.warning("without the metrics: %s", error, extra={"action": "metrics_unknown"})
            else:
                if fleet.workers and fleet.jobs_per_second:
                    return Speed(fleet.jobs_per_second / fleet.workers, "measured by the metrics")
        if measured := self._queue_speed.jobs_per_second:
            return Speed(measured, "measured by the queue, at least")
        if self._assumed_speed:
            return self._assumed_speed
        raise errors.SetupError(
            "how fast a replica is, is not known yet: give --images-per-second, or --prometheus"
        )

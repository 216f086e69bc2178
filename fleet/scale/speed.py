"""How fast a replica is: as given, as measured, or as assumed until then."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from fleet.monitor import prometheus, rates
from imagefleet import errors

log = logging.getLogger(__name__)

#: The queue's own fall tells a speed once this much work was done: ten replicas' minute.
_MEASURED_REPLICA_SECONDS = 600.0

#: Looks that the queue's fall is measured over: half an hour of them.
_LOOKS = 30


@dataclass(frozen=True, slots=True)
class Speed:
    """Jobs/s of one replica, and where that comes from."""

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


class Speeds:
    """The best that is known; *server* has the workers' metrics."""

    def __init__(
        self,
        *,
        given: Speed | None = None,
        assumed: Speed | None = None,
        server: prometheus.Prometheus | None = None,
    ) -> None:
        self.queue = QueueSpeed()
        self._given = given
        self._last = assumed
        self._server = server

    async def find(self) -> Speed:
        """As given, else as measured now or before, else as assumed.

        Raises:
            SetupError: nothing tells it.
        """
        if self._given:
            return self._given
        if measured := await self._measured():
            self._last = measured
        if self._last:
            return self._last
        raise errors.SetupError(
            "how fast a replica is, is not known: give --images-per-second, or --prometheus once"
            " workers run"
        )

    async def _measured(self) -> Speed | None:
        if self._server is not None:
            try:
                fleet = await rates.fleet_rates(self._server)
            except errors.FleetError as error:
                log.warning("without the metrics: %s", error, extra={"action": "metrics_unknown"})
            else:
                if fleet.workers and fleet.jobs_per_second:
                    return Speed(fleet.jobs_per_second / fleet.workers, "measured by the metrics")
        if measured := self.queue.jobs_per_second:
            return Speed(measured, "measured by the queue, at least")
        return None

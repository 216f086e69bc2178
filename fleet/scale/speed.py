"""The speed of a replica: given, measured, or assumed until it is measured."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from fleet.monitor import prometheus, rates
from imagefleet import errors

log = logging.getLogger(__name__)

#: Work, in replica-seconds, after which the shrinking queue gives a speed.
_MEASURED_REPLICA_SECONDS = 600.0

#: Samples in the measurement: half an hour by default.
_SAMPLES = 30


@dataclass(frozen=True, slots=True)
class Speed:
    """Jobs/s of one replica, and the source of that number."""

    jobs_per_second: float
    source: str


class QueueSpeed:
    """A lower bound of a replica's speed, from how fast the queue shrinks."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=_SAMPLES)

    def add(self, at: float, messages: int, running: int) -> None:
        before_at, _, worked = self._samples[-1] if self._samples else (at, 0, 0.0)
        self._samples.append((at, messages, worked + running * (at - before_at)))

    @property
    def jobs_per_second(self) -> float | None:
        """None until it is measured, and while the queue grows."""
        if not self._samples:
            return None
        (_, first, before), (_, last, after) = self._samples[0], self._samples[-1]
        if after - before < _MEASURED_REPLICA_SECONDS or last >= first:
            return None
        return (first - last) / (after - before)


class Speeds:
    """The best known speed; *server* has the workers' metrics."""

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
        """As given, else the last measured, else as assumed.

        Raises:
            SetupError: none of them is known.
        """
        if self._given:
            return self._given
        if measured := await self._measured():
            self._last = measured
        if self._last:
            return self._last
        raise errors.SetupError(
            "the speed of a replica is unknown: give --images-per-second, or --prometheus once"
            " workers run"
        )

    async def _measured(self) -> Speed | None:
        if self._server is not None:
            try:
                fleet = await rates.fleet_rates(self._server)
            except errors.FleetError as error:
                log.warning("no metrics: %s", error, extra={"action": "metrics_unknown"})
            else:
                if fleet.workers and fleet.jobs_per_second:
                    return Speed(fleet.jobs_per_second / fleet.workers, "measured by the metrics")
        if measured := self.queue.jobs_per_second:
            return Speed(measured, "measured by the queue (lower bound)")
        return None

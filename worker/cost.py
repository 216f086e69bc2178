"""The cost of a replica from its start, and the part of it that was wasted.

A replica is billed while it runs: loading the model, waiting and draining included. Start-up, idle
and busy time add up to the GPU's cost; the time of failed and duplicate images is part of the busy
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from imagefleet.storage.protocol import Operations
from worker.gpu_thread import EngineThread
from worker.replica import Replica

_SECONDS_PER_HOUR = 3600

LostImage = Literal["failed", "duplicate", "second_drawing"]
"""Why an image that the GPU generated is not stored by this worker as a job's."""


class CostMeter(Collector):
    """One replica's cost, computed at each scrape; the GPU's only where its price is known."""

    def __init__(
        self,
        engine_thread: EngineThread,
        replica: Replica,
        operations: Operations,
        began_at: float | None = None,
    ) -> None:
        """*began_at*: the start of billing (monotonic seconds); None: now."""
        self._engine_thread = engine_thread
        self._replica = replica
        self._operations = operations
        self._began_at = time.monotonic() if began_at is None else began_at
        #: This replica's part of each image's metadata, in ASCII (`fleet.report.records`).
        self.record = {
            "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "gpu": replica.gpu.encode("ascii", "replace").decode(),
        }
        if replica.dollars_per_hour is not None:
            self.record["price_per_hour"] = f"{replica.dollars_per_hour:g}"
        self._ready_at: float | None = None
        self._idle_seconds = 0.0
        self._lost_seconds: dict[str, float] = dict.fromkeys(get_args(LostImage), 0.0)

    @property
    def gpu_dollars(self) -> float | None:
        """Dollars for the GPU from the start until now; None where the price is unknown."""
        return self._dollars(time.monotonic() - self._began_at)

    @property
    def storage_dollars(self) -> float:
        """Dollars for the storage's operations so far; keeping images is billed by the month."""
        prices = self._replica.storage_prices
        return (
            self._operations.queue * prices.queue_operation
            + self._operations.blob_writes * prices.blob_write
            + self._operations.blob_reads * prices.blob_read
        )

    def ready(self) -> None:
        """The start-up is over: the engine is loaded."""
        self._ready_at = time.monotonic()
        self.record["start_up_seconds"] = f"{self._ready_at - self._began_at:.3f}"

    def lost(self, reason: LostImage) -> None:
        """A generated image is no job's: counts the mean time of one."""
        clock = self._engine_thread.clock
        if clock.images:
            self._lost_seconds[reason] += clock.busy_seconds / clock.images

    def wasted_seconds(self) -> dict[str, float]:
        """Wasted seconds of the replica by reason."""
        now = time.monotonic()
        ready_at = now if self._ready_at is None else self._ready_at
        clock, tick_began_at = self._engine_thread.clock, self._engine_thread.tick_began_at
        in_tick = 0.0 if tick_began_at is None else now - tick_began_at
        # The engine's thread writes both while this reads them. Prometheus takes a counter that
        # decreases, even by one tick, for a reset and adds its whole value again.
        self._idle_seconds = max(self._idle_seconds, now - ready_at - clock.busy_seconds - in_tick)
        return {
            "start_up": ready_at - self._began_at,
            "idle": self._idle_seconds,
            **self._lost_seconds,
        }

    def collect(self) -> Iterator[Metric]:
        cost = CounterMetricFamily(
            "imagefleet_cost_dollars",
            "Cost of this replica: its running time and its storage operations.",
            labels=["kind"],
        )
        cost.add_metric(["storage"], self.storage_dollars)
        if (gpu_dollars := self.gpu_dollars) is not None:
            cost.add_metric(["gpu"], gpu_dollars)
            wasted = CounterMetricFamily(
                "imagefleet_wasted_dollars",
                "GPU cost without a stored image, by reason.",
                labels=["reason"],
            )
            for reason, seconds in self.wasted_seconds().items():
                wasted.add_metric([reason], self._dollars(seconds) or 0.0)
            yield wasted
            yield GaugeMetricFamily(
                "imagefleet_price_dollars_per_hour",
                "Price of this replica.",
                value=self._replica.dollars_per_hour,
            )
        yield cost
        operations = CounterMetricFamily(
            "imagefleet_storage_operations", "Billed storage operations by kind.", labels=["kind"]
        )
        operations.add_metric(["queue"], self._operations.queue)
        operations.add_metric(["blob_write"], self._operations.blob_writes)
        operations.add_metric(["blob_read"], self._operations.blob_reads)
        yield operations
        if self._ready_at is not None:
            yield GaugeMetricFamily(
                "imagefleet_start_up_seconds",
                "Time from this worker's start until its engine was loaded.",
                value=self._ready_at - self._began_at,
            )

    def _dollars(self, seconds: float) -> float | None:
        price = self._replica.dollars_per_hour
        return None if price is None else seconds / _SECONDS_PER_HOUR * price

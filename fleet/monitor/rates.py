"""Rates of a fleet and of its workers over the last minutes, queried from Prometheus.

The queries use the workers' own series: they need no recording rules.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from fleet.monitor.prometheus import Prometheus
from imagefleet import concurrency, errors

log = logging.getLogger(__name__)

#: Long enough for several pushes or scrapes, short enough to show a change.
WINDOW = "2m"

#: The most names that a message suggests, and the most characters of them.
_SHOWN_FLEETS = 5
_SHOWN_CHARACTERS = 80

_INFO = "imagefleet_worker_info{$fleet}"
_IMAGES = f"rate(imagefleet_images_total{{$fleet}}[{WINDOW}])"
_DOLLARS = f"rate(imagefleet_cost_dollars_total{{$fleet}}[{WINDOW}])"
_GPU_DOLLARS = f'rate(imagefleet_cost_dollars_total{{kind="gpu",$fleet}}[{WINDOW}])'
_BUSY = f"rate(imagefleet_gpu_busy_seconds_total{{$fleet}}[{WINDOW}])"
_IDLE = f"rate(imagefleet_gpu_idle_seconds_total{{$fleet}}[{WINDOW}])"
_OUTCOMES = 'outcome=~"completed|duplicate|failed|verified|unverified"'
_ENDED = f"rate(imagefleet_jobs_total{{{_OUTCOMES},$fleet}}[{WINDOW}])"
_MODEL_ENDED = f"rate(imagefleet_model_jobs_total{{{_OUTCOMES},$fleet}}[{WINDOW}])"
_FAILED = "increase(imagefleet_failed_jobs_total{$fleet}[1h])"


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class FleetRates:
    """Rates of the whole fleet; None where there is no data. *left_out*: see the function."""

    workers: int
    images_per_second: float | None
    jobs_per_second: float | None
    gpu_idle_fraction: float | None
    dollars_per_hour: float | None
    images_per_dollar_gpu_only: float | None
    images_per_dollar: float | None
    left_out: str | None = None
    replicas: int = 0
    """Machines: each has one worker, or one for each of its GPUs."""


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of one worker; *failed_jobs* in the last hour."""

    instance: str
    worker: str
    gpu: str
    group: str
    images_per_second: float
    gpu_idle_fraction: float | None
    dollars_per_hour: float | None
    images_per_dollar: float | None
    failed_jobs: float


async def fleet_rates(prometheus: Prometheus) -> FleetRates:
    """Raises the errors of `Prometheus.at`."""
    now = datetime.now(UTC)

    async def value(query: str) -> float | None:
        found = await prometheus.at(query, now)
        return found[0].last if found else None

    workers, images, jobs, idle, dollars, per_gpu_dollar, per_dollar = await concurrency.gather(
        value(f"sum({_INFO})"),
        value(f"sum({_IMAGES})"),
        value(f"sum({_ENDED})"),
        value(_idle_fraction("sum")),
        value(f"3600 * sum({_DOLLARS})"),
        value(f"sum({_IMAGES}) / sum({_GPU_DOLLARS})"),
        value(f"sum({_IMAGES}) / sum({_DOLLARS})"),
    )
    return FleetRates(
        workers=int(workers or 0),
        images_per_second=images,
        jobs_per_second=jobs,
        gpu_idle_fraction=idle,
        dollars_per_hour=dollars,
        images_per_dollar_gpu_only=per_gpu_dollar,
        # The storage's cost alone, without the GPU's, would give far too high a figure.
        images_per_dollar=None if per_gpu_dollar is None else per_dollar,
        left_out=await left_out(prometheus, now),
        replicas=int(await value(f"count(count by (instance) ({_INFO}))") or 0),
    )


class Watch:
    """A fleet's rates, asked for again and again; an outage of the server is only logged."""

    def __init__(self, server: Prometheus | None) -> None:
        self.is_down = False
        self._server = server
        self._left_out: str | None = None

    async def fleet(self) -> FleetRates | None:
        """The rates; None without a server, and while it does not answer."""
        found = await self._ask(fleet_rates)
        if found is not None:
            if found.left_out and found.left_out != self._left_out:
                log.warning("%s", found.left_out, extra={"action": "workers_left_out"})
            self._left_out = found.left_out
        return found

    async def by_model(self) -> dict[str, float]:
        """The jobs/s of each model; none without an answer."""
        return await self._ask(jobs_per_second_by_model) or {}

    async def _ask(self, query: Callable[[Prometheus], Awaitable[_Answer]]) -> _Answer | None:
        if self._server is None:
            return None
        try:
            found = await query(self._server)
        except errors.FleetError as error:
            log.warning("without the metrics: %s", error, extra={"action": "metrics_unknown"})
            self.is_down = True
            return None
        self.is_down = False
        return found


async def jobs_per_second_by_model(prometheus: Prometheus) -> dict[str, float]:
    """The jobs that all workers end, by the model they are drawn with.

    Raises the errors of `Prometheus.at`.
    """
    found = await prometheus.at(f"sum by (model) ({_MODEL_ENDED})", datetime.now(UTC))
    return {each.labels.get("model", ""): each.last for each in found}


async def left_out(prometheus: Prometheus, at: datetime, window: str = WINDOW) -> str | None:
    """A sentence about a fleet under another name, which would seem to stand still; else None."""
    if prometheus.fleet is None:
        return None
    counts = f"count by (fleet) (last_over_time(imagefleet_worker_info[{window}]))"
    fleets = {each.labels.get("fleet", "") for each in await prometheus.at(counts, at)}
    if fleets and prometheus.fleet not in fleets:
        others = ", ".join(name[:_SHOWN_CHARACTERS] for name in sorted(fleets)[:_SHOWN_FLEETS])
        return f"no worker of fleet {prometheus.fleet}; --fleet chooses another, such as {others}"
    return None


async def worker_rates(prometheus: Prometheus) -> list[WorkerRates]:
    """The workers that reported in the last minutes, the slowest first.

    Raises the errors of `Prometheus.at`.
    """
    now = datetime.now(UTC)
    infos = await prometheus.at(_INFO, now)

    async def by_gpu(query: str) -> dict[tuple[str, str], float]:
        return {_gpu(each.labels): each.last for each in await prometheus.at(query, now)}

    each_sum = "sum by (instance, device) "
    images, idle, prices, per_dollar, failed = await concurrency.gather(
        by_gpu(f"{each_sum}({_IMAGES})"),
        by_gpu(_idle_fraction(each_sum)),
        by_gpu(f"{each_sum}(imagefleet_price_dollars_per_hour{{$fleet}})"),
        by_gpu(f"{each_sum}({_IMAGES}) / {each_sum}({_DOLLARS})"),
        by_gpu(f"{each_sum}({_FAILED})"),
    )
    found = [
        WorkerRates(
            instance=(name := _gpu(labels))[0],
            worker=labels.get("worker", ""),
            gpu=labels.get("gpu", ""),
            group=labels.get("group", ""),
            images_per_second=images.get(name, 0.0),
            gpu_idle_fraction=idle.get(name),
            dollars_per_hour=prices.get(name),
            images_per_dollar=per_dollar.get(name) if prices.get(name) else None,
            failed_jobs=failed.get(name, 0.0),
        )
        for labels in (info.labels for info in infos)
    ]
    return sorted(found, key=lambda each: (each.images_per_second, each.instance))


def _gpu(labels: Mapping[str, str]) -> tuple[str, str]:
    """What tells a worker from all others; `device` is one of several GPUs of its machine."""
    return labels.get("instance", ""), labels.get("device", "")


def _idle_fraction(total: str) -> str:
    return f"{total}({_IDLE}) / ({total}({_IDLE}) + {total}({_BUSY}))"

"""Rates of a fleet and of its workers over the last minutes, queried from Prometheus.

The queries use the workers' own series: they need no recording rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from fleet.monitor.prometheus import Prometheus

#: Long enough for several pushes or scrapes, short enough to show a change.
WINDOW = "2m"

_IMAGES = f"rate(imagefleet_images_total[{WINDOW}])"
_DOLLARS = f"rate(imagefleet_cost_dollars_total[{WINDOW}])"
_BUSY = f"rate(imagefleet_gpu_busy_seconds_total[{WINDOW}])"
_IDLE = f"rate(imagefleet_gpu_idle_seconds_total[{WINDOW}])"
_ENDED = f'rate(imagefleet_jobs_total{{outcome=~"completed|duplicate|failed"}}[{WINDOW}])'
_FAILED = "increase(imagefleet_failed_jobs_total[1h])"


@dataclass(frozen=True, slots=True)
class FleetRates:
    """Rates of the whole fleet; None where there is no data."""

    workers: int
    images_per_second: float | None
    jobs_per_second: float | None
    gpu_idle_fraction: float | None
    dollars_per_hour: float | None
    images_per_dollar_gpu_only: float | None
    images_per_dollar: float | None


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

    async def total(query: str) -> float | None:
        found = await prometheus.at(f"sum({query})", now)
        return found[0].last if found else None

    workers, images, jobs, busy, idle, gpu, dollars = await asyncio.gather(
        total("imagefleet_worker_info"),
        total(_IMAGES),
        total(_ENDED),
        total(_BUSY),
        total(_IDLE),
        total(_DOLLARS.replace("_total[", '_total{kind="gpu"}[')),
        total(_DOLLARS),
    )
    return FleetRates(
        workers=int(workers or 0),
        images_per_second=images,
        jobs_per_second=jobs,
        gpu_idle_fraction=_ratio(idle, None if busy is None else busy + (idle or 0)),
        dollars_per_hour=None if dollars is None else dollars * 3600,
        images_per_dollar_gpu_only=_ratio(images, gpu),
        # The storage's cost alone, without the GPU's, would give far too high a figure.
        images_per_dollar=_ratio(images, dollars) if gpu else None,
    )


async def worker_rates(prometheus: Prometheus) -> list[WorkerRates]:
    """The workers that reported in the last minutes, the slowest first.

    Raises the errors of `Prometheus.at`.
    """
    now = datetime.now(UTC)

    async def by_instance(query: str) -> dict[str, float]:
        found = await prometheus.at(f"sum by (instance) ({query})", now)
        return {each.labels.get("instance", ""): each.last for each in found}

    infos = await prometheus.at("imagefleet_worker_info", now)
    images, busy, idle, dollars, prices, failed = await asyncio.gather(
        by_instance(_IMAGES),
        by_instance(_BUSY),
        by_instance(_IDLE),
        by_instance(_DOLLARS),
        by_instance("imagefleet_price_dollars_per_hour"),
        by_instance(_FAILED),
    )
    found = []
    for info in infos:
        name = info.labels.get("instance", "")
        rate = images.get(name, 0.0)
        price = prices.get(name)
        found.append(
            WorkerRates(
                instance=name,
                worker=info.labels.get("worker", ""),
                gpu=info.labels.get("gpu", ""),
                group=info.labels.get("group", ""),
                images_per_second=rate,
                gpu_idle_fraction=_share(name, idle, busy),
                dollars_per_hour=price,
                images_per_dollar=_ratio(rate, dollars.get(name)) if price else None,
                failed_jobs=failed.get(name, 0.0),
            )
        )
    return sorted(found, key=lambda each: (each.images_per_second, each.instance))


def _share(name: str, part: Mapping[str, float], rest: Mapping[str, float]) -> float | None:
    return _ratio(part.get(name), part.get(name, 0.0) + rest[name] if name in rest else None)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below

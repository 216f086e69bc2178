"""The duration and cost of a batch on a mix of GPU classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet.plan.inputs import Input
from imagefleet import errors
from imagefleet.pricing import prices

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas of one GPU class, with the speed, price and billed start-up of each."""

    gpu: str
    replicas: int
    images_per_second: Input
    dollars_per_hour: Input
    start_up_seconds: Input

    @property
    def images_per_dollar_gpu_only(self) -> float:
        """After start-up."""
        return self.images_per_second.value * _SECONDS_PER_HOUR / self.dollars_per_hour.value


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch on a fleet that starts all at once and is busy until the end."""

    jobs: int
    images: int
    replicas: int
    hours: float
    gpu_dollars: float
    storage_dollars: float
    dollars: float
    images_per_dollar_gpu_only: float
    images_per_dollar: float
    mix: Sequence[Part]


def make_plan(
    jobs: int, images: int, mix: Sequence[Part], table: prices.PriceTable = prices.BUILT_IN
) -> Plan:
    """The plan of a batch on *mix*, whose parts share the work by their speed."""
    images_per_second = sum(part.replicas * part.images_per_second.value for part in mix)
    missed = sum(
        part.replicas * part.images_per_second.value * part.start_up_seconds.value for part in mix
    )
    hours = (images + missed) / images_per_second / _SECONDS_PER_HOUR
    gpu_dollars = hours * sum(part.replicas * part.dollars_per_hour.value for part in mix)
    storage_dollars = prices.storage_dollars(jobs, images, table)
    return Plan(
        jobs=jobs,
        images=images,
        replicas=sum(part.replicas for part in mix),
        hours=hours,
        gpu_dollars=gpu_dollars,
        storage_dollars=storage_dollars,
        dollars=gpu_dollars + storage_dollars,
        images_per_dollar_gpu_only=images / gpu_dollars,
        images_per_dollar=images / (gpu_dollars + storage_dollars),
        mix=mix,
    )


def mix_for(images: int, mix: Sequence[Part], deadline_hours: float) -> list[Part]:
    """The fewest replicas, in the proportions of *mix*, that meet the deadline.

    Raises:
        SetupError: start-up alone takes longer.
    """
    seconds = deadline_hours * _SECONDS_PER_HOUR
    made = sum(
        part.replicas
        * part.images_per_second.value
        * max(0.0, seconds - part.start_up_seconds.value)
        for part in mix
    )
    if not made:
        raise errors.SetupError("no replica is ready within the deadline: start-up is longer")
    return [replace(part, replicas=math.ceil(part.replicas * images / made)) for part in mix]

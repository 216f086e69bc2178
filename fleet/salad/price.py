"""The cost of a fleet on SaladCloud, and its images per dollar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fleet import console
from fleet.plan.inputs import Bench, bench_of
from fleet.salad.gpus import GpuClass
from fleet.salad.records import Group
from imagefleet import errors

_HOURS_PER_DAY = 24


@dataclass(frozen=True, slots=True)
class PriceRange:
    """$/h, from the cheapest to the most expensive of the GPU classes."""

    least: float
    most: float

    def times(self, replicas: int) -> PriceRange:
        return PriceRange(self.least * replicas, self.most * replicas)

    def __str__(self) -> str:
        return f"{self._dollars(1)}/h"

    @property
    def per_day(self) -> str:
        return f"{self._dollars(_HOURS_PER_DAY)}/day"

    def _dollars(self, hours: float) -> str:
        if self.least == self.most:
            return f"${self.most * hours:,.2f}"
        return f"${self.least * hours:,.2f} to ${self.most * hours:,.2f}"


def replica_price(classes: Sequence[GpuClass], priority: str) -> PriceRange:
    """The price of one replica: a range, since SaladCloud uses whichever class is free.

    Raises:
        SetupError: a class has no price at that priority.
    """
    for each in classes:
        if priority not in each.dollars_per_hour:
            raise errors.SetupError(f"no price is known for the {each.name} at {priority} priority")
    dollars = [each.dollars_per_hour[priority] for each in classes]
    return PriceRange(min(dollars), max(dollars))


def group_price(group: Group, known: Sequence[GpuClass]) -> PriceRange | None:
    """The price of one replica of *group*, or None if that of a class is unknown."""
    classes = [each for each in known if each.id in group.gpu_ids]
    prices_known = all(group.priority in each.dollars_per_hour for each in classes)
    if not prices_known or len(classes) < len(group.gpu_ids) or not classes:
        return None
    return replica_price(classes, group.priority)


def print_price(
    replicas: int,
    classes: Sequence[GpuClass],
    priority: str,
    benches: Sequence[Bench],
    source: str,
) -> None:
    """Prints the price of all replicas, and for each class its price and images per dollar."""
    price = replica_price(classes, priority).times(replicas)
    console.stdout.print(
        f"{replicas:,} replicas at {priority} priority: {price}, {price.per_day} while all run.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    table.add_column("GPU")
    for heading in ("$/h each", f"$/h for {replicas:,}", "images/s each", "images/$, GPU only"):
        table.add_column(heading, justify="right")
    for each in classes:
        dollars = each.dollars_per_hour[priority]
        bench = bench_of(each.name, benches)
        speed = bench.images_per_second.value if bench else None
        table.add_row(
            each.name,
            f"{dollars:g}",
            f"{dollars * replicas:,.2f}",
            "-" if speed is None else f"{speed:.2f}",
            "-" if speed is None or not dollars else f"{speed * 3600 / dollars:,.0f}",
        )
    console.stdout.print(table)
    console.stdout.print(f"Prices: {source}.", highlight=False)
    if not benches:
        console.stdout.print(
            "For images per dollar give --bench, a report of `imagefleet bench engine --report`."
        )

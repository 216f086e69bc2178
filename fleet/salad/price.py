"""What a fleet on SaladCloud costs, and what its dollars buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fleet import console
from fleet.plan.inputs import Bench, bench_of, read_bench
from fleet.salad.gpus import GpuClass
from fleet.salad.records import Group
from imagefleet import errors
from imagefleet.pricing import prices

_HOURS_A_DAY = 24


@dataclass(frozen=True, slots=True)
class Range:
    """Dollars per hour, from the cheapest of the GPU classes to the dearest."""

    least: float
    most: float

    def of(self, replicas: int) -> Range:
        return Range(self.least * replicas, self.most * replicas)

    def __str__(self) -> str:
        if self.least == self.most:
            return f"${self.most:,.2f}"
        return f"${self.least:,.2f} to ${self.most:,.2f}"

    @property
    def a_day(self) -> Range:
        return self.of(_HOURS_A_DAY)


def of_a_replica(classes: Sequence[GpuClass], priority: str) -> Range:
    """A replica gets the first class that is free, so its price is a range.

    Raises:
        SetupError: one of them has no price at that priority.
    """
    for each in classes:
        if priority not in each.dollars_per_hour:
            raise errors.SetupError(f"no price is known for the {each.name} at {priority} priority")
    dollars = [each.dollars_per_hour[priority] for each in classes]
    return Range(min(dollars), max(dollars))


def of_group(group: Group, known: Sequence[GpuClass]) -> Range | None:
    """Of one replica of it; None where one of its classes has no price that is known."""
    classes = [each for each in known if each.id in group.gpu_ids]
    prices_known = all(group.priority in each.dollars_per_hour for each in classes)
    if not prices_known or len(classes) < len(group.gpu_ids) or not classes:
        return None
    return of_a_replica(classes, group.priority)


def read_benches(
    paths: Sequence[Path], classes: Sequence[GpuClass], table: prices.PriceTable
) -> list[Bench]:
    """The reports of `imagefleet bench engine`.

    Raises:
        SetupError: one is no such report, or of a class that the fleet does not take.
    """
    benches = [read_bench(path, table) for path in paths]
    names = [each.name for each in classes]
    for bench in benches:
        if bench.gpu not in names:
            raise errors.SetupError(
                f"{bench.path} was measured on {bench.gpu}, which is none of the fleet's classes:"
                f" {', '.join(names)}"
            )
    return benches


def print_price(
    replicas: int,
    classes: Sequence[GpuClass],
    priority: str,
    benches: Sequence[Bench],
    source: str,
) -> None:
    """The price of all replicas, and of each class with what its dollar buys."""
    price = of_a_replica(classes, priority)
    console.stdout.print(
        f"{replicas:,} replicas at {priority} priority: {price.of(replicas)} an hour,"
        f" {price.of(replicas).a_day} a day while all of them run.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    table.add_column("GPU")
    for heading in ("$/h of one", f"$/h of {replicas:,}", "images/s of one", "images/$, GPU only"):
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

"""`imagefleet plan`: how long a batch takes, what it costs and how many replicas it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from fleet import console
from jobs import errors, prices

SPEEDS_SOURCE = (
    "assumed: the best SD1.5 record of the card in SD.Next's public benchmark logs of 2025"
    " (vladmandic/sd-data), scaled to 512x512, 15 steps with guidance; not measured with imagefleet"
)

#: Images a second of one card. Records are iterations a second at 20 steps; an image of 15 steps
#: with its decoding costs 26.64 of the 34.67 TFLOP of one of 20, so images = iterations / 15.37.
ASSUMED_IMAGES_PER_SECOND: Mapping[str, float] = {
    "RTX 3060 8GB": 0.60,
    "RTX 3060 12GB": 0.60,
    "RTX 3060 Ti 8GB": 0.83,
    "RTX 3070 8GB": 0.82,
    "RTX 3080 10GB": 1.27,
    "RTX 3090 24GB": 1.63,
    "RTX 4060 Ti 16GB": 0.93,
    "RTX 4070 12GB": 1.25,
    "RTX 4070 Ti Super 16GB": 1.91,
    "RTX 4080 16GB": 1.74,
    "RTX 4090 24GB": 3.75,
    "RTX 5070 12GB": 1.20,
    "RTX 5070 Ti 16GB": 1.60,
    "RTX 5080 16GB": 2.09,
    "RTX 5090 32GB": 4.52,
}

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch on a fleet that is busy from its first second to its last."""

    jobs: int
    images: int
    replicas: int
    hours: float
    gpu_dollars: float
    storage_dollars: float
    dollars: float
    images_per_dollar_gpu_only: float
    images_per_dollar: float


def replicas_for(images: int, images_per_second: float, deadline_hours: float) -> int:
    """The fewest replicas that make *images* within the deadline."""
    return math.ceil(images / (images_per_second * deadline_hours * _SECONDS_PER_HOUR))


def make_plan(
    jobs: int, images: int, images_per_second: float, dollars_per_hour: float, replicas: int
) -> Plan:
    """Hours and dollars of a batch; *images_per_second* and *dollars_per_hour* of one replica."""
    replica_hours = images / images_per_second / _SECONDS_PER_HOUR
    gpu_dollars = replica_hours * dollars_per_hour
    storage_dollars = prices.storage_dollars(jobs, images)
    return Plan(
        jobs=jobs,
        images=images,
        replicas=replicas,
        hours=replica_hours / replicas,
        gpu_dollars=gpu_dollars,
        storage_dollars=storage_dollars,
        dollars=gpu_dollars + storage_dollars,
        images_per_dollar_gpu_only=images / gpu_dollars,
        images_per_dollar=images / (gpu_dollars + storage_dollars),
    )


@dataclass(frozen=True, slots=True)
class _Input:
    """A number that the plan rests on, and where it comes from."""

    value: float
    source: str


def command(
    jobs: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Jobs in the batch.")],
    images_per_job: Annotated[
        int, typer.Option(min=1, max=64, metavar="COUNT", help="Images of each job.")
    ] = 1,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="GPU class, for its price and speed.")
    ] = "RTX 3060 Ti",
    priority: Annotated[
        str, typer.Option(metavar="|".join(prices.PRIORITIES), help="SaladCloud's priority.")
    ] = "batch",
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="DOLLARS", help="Of one replica; instead of the table's."),
    ] = None,
    images_per_second: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="NUMBER", help="Of one replica, as you measured it."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Replicas at work.")
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="HOURS", help="How many replicas finish in time?"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tells a batch's hours, dollars and images a dollar.

    Or how many replicas a deadline needs. What was not given is assumed, and said so.

    imagefleet plan --jobs 1000000 --replicas 100

    imagefleet plan --jobs 1000000 --gpu "RTX 4090" --deadline-hours 24
    """
    with console.one_line_errors():
        if replicas is not None and deadline_hours is not None:
            raise errors.SetupError("give --replicas or --deadline-hours; one follows the other")
        price = _price(gpu, priority, price_per_hour)
        speed = _speed(gpu, images_per_second)
    images = jobs * images_per_job
    if deadline_hours is not None:
        replicas = replicas_for(images, speed.value, deadline_hours)
    plan = make_plan(jobs, images, speed.value, price.value, replicas or 1)
    inputs = {"images_per_second": speed, "dollars_per_hour": price}
    if as_json:
        sources = {name: asdict(each) for name, each in inputs.items()}
        console.print_json({**asdict(plan), "inputs": sources})
    else:
        _show(plan, speed, price)


def _price(gpu: str, priority: str, given: float | None) -> _Input:
    if given is not None:
        return _Input(given, "given")
    if priority not in prices.PRIORITIES:
        raise errors.SetupError(
            f"--priority: should be {', '.join(prices.PRIORITIES)}, not {priority}"
        )
    name = prices.find_gpu(gpu)
    source = f"{name} at {priority} priority, {prices.GPU_PRICES_SOURCE}"
    return _Input(prices.gpu_dollars_per_hour(name, priority), source)


def _speed(gpu: str, given: float | None) -> _Input:
    if given is not None:
        return _Input(given, "given")
    name = prices.find_gpu(gpu)
    if name not in ASSUMED_IMAGES_PER_SECOND:
        raise errors.SetupError(f"no speed is known for the {name}: give --images-per-second")
    return _Input(ASSUMED_IMAGES_PER_SECOND[name], f"{name}, {SPEEDS_SOURCE}")


def _show(plan: Plan, speed: _Input, price: _Input) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(plan).items():
        table.add_row(name, value)
    console.stdout.print(table)
    console.stdout.print(f"\n{speed.value:g} images a second a replica: {speed.source}.")
    console.stdout.print(f"${price.value:g} an hour a replica: {price.source}.")
    console.stdout.print(f"Storage operations: {prices.STORAGE_PRICES_SOURCE}.")
    console.stdout.print("Start-up, interruptions and keeping the images are not counted.")


def _rows(plan: Plan) -> dict[str, Any]:
    return {
        "images": f"{plan.images:,}",
        "replicas": f"{plan.replicas:,}",
        "hours": f"{plan.hours:,.2f}",
        "GPU": f"${plan.gpu_dollars:,.2f}",
        "storage operations": f"${plan.storage_dollars:,.2f}",
        "all in": f"${plan.dollars:,.2f}",
        "images a dollar, GPU only": f"{plan.images_per_dollar_gpu_only:,.0f}",
        "images a dollar, all in": f"{plan.images_per_dollar:,.0f}",
    }

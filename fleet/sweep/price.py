"""The hours and the price of a sweep, before anything of it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleet import options
from fleet.options import option
from fleet.plan import estimate
from fleet.plan.work import Models, Work, add_stages
from imagefleet import errors
from imagefleet.pricing import prices
from loadgen.caption_sweep import SweepSource


@dataclass(frozen=True, slots=True)
class Machines:
    """What draws them, for the hours and the price."""

    gpu: str | None = option("GPU class, for the price.", metavar="NAME")
    replicas: int = option("Their number, for the hours.", 1, min=1, metavar="COUNT")
    images_per_second: float | None = option(
        "Speed of one replica at these steps.", min=0.0001, metavar="NUMBER"
    )
    price_per_hour: float | None = option("$/h of one replica.", min=0.0001, metavar="DOLLARS")
    bench: Path | None = option("JSON of `imagefleet bench engine`, for the speed.", metavar="FILE")
    prices_path: options.PriceFile = None


def plan(source: SweepSource, machines: Machines, models: Models) -> estimate.Plan:
    """The sweep on machines of one class; *models* tells the families.

    Raises:
        SetupError: the class or its speed is not known, or a file cannot be read.
    """
    table = prices.read_table(machines.prices_path)
    benches = [estimate.read_bench(machines.bench, table)] if machines.bench else []
    gpu = machines.gpu or (benches[0].gpu if benches else estimate.DEFAULT_GPU)
    works = _works(source, models)
    known = estimate.Known(
        table, benches, "batch", machines.price_per_hour, machines.images_per_second
    )
    mix = estimate.make_mix([(gpu, machines.replicas)], works, known)
    images = sum(work.images for work in works)
    return estimate.make_plan(images, images, mix, table)


def command(plan_: estimate.Plan) -> str:
    """The call of `imagefleet plan` for the same images, to compare machines with."""
    part = plan_.mix[0]
    speed, price = part.images_per_second.value, part.dollars_per_hour.value
    return (
        f"imagefleet plan --jobs {plan_.jobs} --replicas {plan_.replicas}"
        f" --gpu '{part.gpu}' --images-per-second {speed:.3g} --price-per-hour {price:g}"
    )


def _works(source: SweepSource, models: Models) -> list[Work]:
    """The images of all stages by model, with their own sizes and steps.

    Raises:
        SetupError: a stage is of a size that its model's family cannot have.
    """
    found: dict[str | None, Work] = {}
    for job in source.first_jobs():
        try:
            add_stages(found, models, job, source.sweep.captions.count)
        except errors.JobError as error:
            raise errors.SetupError(error.message) from None
    return list(found.values())

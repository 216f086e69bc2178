"""The hours and the price of a sweep, before anything of it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fleet import options
from fleet.plan import estimate
from fleet.plan.work import Models, Work, add_stages
from imagefleet import errors
from imagefleet.pricing import prices
from loadgen.caption_sweep import SweepSource

DEFAULT_GPU = "RTX 3060 Ti"

_PRIORITY: prices.Priority = "batch"

_NO_START_UP = estimate.Input(0.0, "assumed", "not included without --bench")


@dataclass(frozen=True, slots=True)
class Machines:
    """What draws them, for the hours and the price."""

    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="GPU class, for the price.")] = (
        None
    )
    replicas: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Their number, for the hours.")
    ] = 1
    images_per_second: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="NUMBER", help="Speed of one replica at these steps."),
    ] = None
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0001, metavar="DOLLARS", help="$/h of one replica.")
    ] = None
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of `imagefleet bench engine`, for the speed."),
    ] = None
    prices_path: options.PriceFile = None


def plan(source: SweepSource, machines: Machines, models: Models) -> estimate.Plan:
    """The sweep on machines of one class; *models* tells the families.

    Raises:
        SetupError: the class or its speed is not known, or a file cannot be read.
    """
    table = prices.read_table(machines.prices_path)
    benches = [estimate.read_bench(machines.bench, table)] if machines.bench else []
    gpu = machines.gpu or (benches[0].gpu if benches else DEFAULT_GPU)
    if machines.images_per_second is None or machines.price_per_hour is None:
        matching = prices.matching_gpus(gpu, [bench.gpu for bench in benches])
        gpu = matching[0] if matching else prices.find_gpu(gpu, table.gpus)
    estimate.refuse_unused(benches, {gpu})
    works = _works(source, models)
    speeds = estimate.find_speeds(gpu, works, machines.images_per_second, benches)
    made_on = estimate.bench_of(gpu, benches, works[0].family)
    part = estimate.Part(
        gpu,
        machines.replicas,
        estimate.mean_speed(speeds),
        estimate.find_price(gpu, _PRIORITY, machines.price_per_hour, table),
        made_on.start_up if made_on else _NO_START_UP,
        speeds,
    )
    images = sum(work.images for work in works)
    return estimate.make_plan(images, images, [part], table)


def command(plan_: estimate.Plan) -> str:
    """The call of `imagefleet plan` for the same images, to compare machines with."""
    part = plan_.mix[0]
    speed, price = part.images_per_second.value, part.dollars_per_hour.value
    return (
        f"imagefleet plan --jobs {plan_.jobs} --replicas {plan_.replicas}"
        f" --gpu '{part.gpu}' --images-per-second {speed:.3g} --price-per-hour {price:g}"
    )


def sources(plan_: estimate.Plan) -> list[str]:
    """The sources of the speeds and of the price, a sentence each."""
    part = plan_.mix[0]
    of_models = [
        (f" of {each.model}" if each.model else "", each.images_per_second) for each in part.models
    ]
    price = part.dollars_per_hour
    return [
        *(
            f"{part.gpu}: {speed.value:.3g} images/s{of_model}: {speed.kind}: {speed.source}."
            for of_model, speed in of_models
        ),
        f"{part.gpu}: ${price.value:g}/h: {price.kind}: {price.source}.",
    ]


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

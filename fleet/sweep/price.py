"""The hours and the price of a sweep, before anything of it is sent."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.plan import estimate
from imagefleet.pricing import price_file, prices
from imagefleet.records.sweep import Sweep

DEFAULT_GPU = "RTX 3060 Ti"

_PRIORITY: prices.Priority = "batch"

#: Of the speeds of `gpus.toml`.
_ASSUMED_STEPS = 15

#: What an image costs besides its steps, its decoding above all, in steps: 2.55 of 1.606 TFLOP.
_STEPS_OF_THE_REST = 1.6

_NO_START_UP = estimate.Input(0.0, "assumed", "not included without --bench")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a sweep is to run on, as the operator has said."""

    gpu: str | None = None
    replicas: int = 1
    images_per_second: float | None = None
    price_per_hour: float | None = None
    bench: Path | None = None
    prices: Path | None = None


def plan(sweep: Sweep, machine: Machine) -> estimate.Plan:
    """The sweep on machines of one class.

    Raises:
        SetupError: the class or its speed is not known, or a file cannot be read.
    """
    table = price_file.read_table(machine.prices)
    bench = estimate.read_bench(machine.bench, table) if machine.bench else None
    gpu = machine.gpu or (bench.gpu if bench else DEFAULT_GPU)
    if machine.images_per_second is None or machine.price_per_hour is None:
        matching = prices.matching_gpus(gpu, [bench.gpu] if bench else [])
        gpu = matching[0] if matching else prices.find_gpu(gpu, table.gpus)
    benches = [bench] if bench else []
    estimate.refuse_unused(benches, {gpu})
    made_on = estimate.bench_of(gpu, benches)
    speed = estimate.find_speed(gpu, machine.images_per_second, made_on)
    if machine.images_per_second is None:
        speed = _scaled(speed, bench.steps if bench else _ASSUMED_STEPS, _steps(sweep))
    part = estimate.Part(
        gpu,
        machine.replicas,
        speed,
        estimate.find_price(gpu, _PRIORITY, machine.price_per_hour, table),
        made_on.start_up if made_on else _NO_START_UP,
    )
    return estimate.make_plan(sweep.images, sweep.images, [part], table)


def command(plan_: estimate.Plan) -> str:
    """The call of `imagefleet plan` for the same images, to compare machines with."""
    part = plan_.mix[0]
    speed, price = part.images_per_second.value, part.dollars_per_hour.value
    return (
        f"imagefleet plan --jobs {plan_.jobs} --replicas {plan_.replicas}"
        f" --gpu '{part.gpu}' --images-per-second {speed:.3g} --price-per-hour {price:g}"
    )


def sources(plan_: estimate.Plan) -> list[str]:
    """Where the speed and the price are from, a sentence each."""
    part = plan_.mix[0]
    speed, price = part.images_per_second, part.dollars_per_hour
    return [
        f"{part.gpu}: {speed.value:.3g} images/s: {speed.kind}: {speed.source}.",
        f"{part.gpu}: ${price.value:g}/h: {price.kind}: {price.source}.",
    ]


def _steps(sweep: Sweep) -> float:
    """Of an image, on average."""
    return statistics.fmean(group.steps for group in sweep.groups)


def _scaled(speed: estimate.Input, measured_steps: int, steps: float) -> estimate.Input:
    factor = (measured_steps + _STEPS_OF_THE_REST) / (steps + _STEPS_OF_THE_REST)
    return replace(
        speed,
        value=speed.value * factor,
        kind="assumed",
        source=f"{speed.value:g} images/s at {measured_steps} steps ({speed.kind}: {speed.source}),"
        f" scaled to {steps:g} steps, whatever the size and the model",
    )

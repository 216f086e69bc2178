"""`imagefleet plan`: the duration, cost and replicas of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fleet import console
from fleet.plan.estimate import Part, Plan, make_plan, mix_for
from fleet.plan.inputs import (
    Bench,
    Input,
    bench_of,
    find_price,
    find_speed,
    read_bench,
    refuse_unused,
)
from imagefleet import errors
from imagefleet.pricing import price_file, prices

_DEFAULT_GPU = "RTX 3060 Ti"


def command(
    jobs: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Jobs in the batch.")],
    images_per_job: Annotated[
        int, typer.Option(min=1, max=64, metavar="COUNT", help="Images per job.")
    ] = 1,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=COUNT]",
            help=f"GPU class; repeat it, with replicas, for a mix. [default: {_DEFAULT_GPU}]",
        ),
    ] = None,
    priority: Annotated[
        str, typer.Option(metavar="|".join(prices.PRIORITIES), help="SaladCloud priority.")
    ] = "batch",
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="DOLLARS", help="$/h of one replica."),
    ] = None,
    prices_path: Annotated[
        Path | None,
        typer.Option("--price-file", metavar="FILE", help="Your own prices, as YAML."),
    ] = None,
    images_per_second: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="NUMBER", help="Speed of one replica."),
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A report of `imagefleet bench engine`; repeatable."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Number of replicas.")
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="HOURS", help="Plan enough replicas to finish in time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plans a batch: hours, dollars and images per dollar.

    With --deadline-hours, also the replicas needed. Every input is shown with its source.

    imagefleet plan --jobs 1000000 --replicas 100

    imagefleet plan --jobs 1000000 --gpu "RTX 3060 Ti=300" --gpu "RTX 4090=20"

    imagefleet plan --jobs 1000000 --gpu "RTX 4090" --deadline-hours 24 --bench bench.json
    """
    with console.one_line_errors():
        if replicas is not None and deadline_hours is not None:
            raise errors.SetupError("give --replicas or --deadline-hours, not both")
        table = price_file.read_table(prices_path)
        benches = [read_bench(path, table) for path in bench or []]
        named = _named(gpu, benches, replicas)
        if len(named) > 1 and (price_per_hour is not None or images_per_second is not None):
            raise errors.SetupError(
                "--price-per-hour and --images-per-second apply to one GPU class; for a mix use"
                " --price-file and --bench"
            )
        known = prices.as_priority(priority)
        has_own = price_per_hour is not None and images_per_second is not None
        mix = []
        for name, count in named:
            found = name if has_own else _class(name, benches, table)
            made_on = bench_of(found, benches)
            mix.append(
                Part(
                    gpu=found,
                    replicas=count,
                    images_per_second=find_speed(found, images_per_second, made_on),
                    dollars_per_hour=find_price(found, known, price_per_hour, table),
                    start_up_seconds=_start_up(made_on),
                )
            )
        refuse_unused(benches, {part.gpu for part in mix})
        images = jobs * images_per_job
        if deadline_hours is not None:
            mix = mix_for(images, mix, deadline_hours)
        plan = make_plan(jobs, images, mix, table)
    if as_json:
        console.print_json({**asdict(plan), "storage_prices": asdict(table.storage)})
    else:
        _show(plan, table)


def _named(
    names: list[str] | None, benches: Sequence[Bench], replicas: int | None
) -> list[tuple[str, int]]:
    """GPU classes as given, and the replicas of each."""
    if not names:
        names = [bench.gpu for bench in benches] or [_DEFAULT_GPU]
    named = []
    for text in names:
        name, equals, count = text.rpartition("=")
        if not equals:
            name, count = text, "1"
        if not (count.isdecimal() and int(count)):
            raise errors.SetupError(f"--gpu {text}: should be NAME or NAME=COUNT")
        if equals and replicas is not None:
            raise errors.SetupError("give either --replicas or --gpu NAME=COUNT")
        named.append((name, int(count)))
    if replicas is None:
        return named
    if len(named) > 1:
        raise errors.SetupError("--replicas is for one GPU class; for a mix use --gpu NAME=COUNT")
    return [(named[0][0], replicas)]


def _class(name: str, benches: Sequence[Bench], table: prices.PriceTable) -> str:
    """The GPU class for *name*; one with a report need not be in the table."""
    own = prices.matching_gpus(name, [bench.gpu for bench in benches])
    return own[0] if own else prices.find_gpu(name, table)


def _start_up(bench: Bench | None) -> Input:
    return bench.start_up if bench else Input(0.0, "assumed", "not included without --bench")


def _show(plan: Plan, table: prices.PriceTable) -> None:
    totals = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    totals.add_column(style="bold")
    totals.add_column(justify="right")
    for name, value in _rows(plan).items():
        totals.add_row(name, value)
    console.stdout.print(totals)
    if len(plan.mix) > 1:
        console.stdout.print(_mix_table(plan.mix))
    console.stdout.print()
    for part in plan.mix:
        speed, price, start_up = (
            part.images_per_second,
            part.dollars_per_hour,
            part.start_up_seconds,
        )
        for text, each in (
            (f"{part.gpu}: {speed.value:g} images/s", speed),
            (f"{part.gpu}: ${price.value:g}/h", price),
            (f"{part.gpu}: {start_up.value:g} s of start-up", start_up),
        ):
            console.stdout.print(f"{text}: {each.kind}: {each.source}.", highlight=False)
    console.stdout.print(f"Storage operations: listed: {table.storage.source}.", highlight=False)
    console.stdout.print("Interruptions, idle time and storing the images are not included.")


def _mix_table(mix: Sequence[Part]) -> Table:
    table = Table()
    table.add_column("GPU")
    for heading in ("replicas", "images/s", "$/h", "images/$, GPU only"):
        table.add_column(heading, justify="right")
    for part in mix:
        table.add_row(
            part.gpu,
            f"{part.replicas:,}",
            f"{part.replicas * part.images_per_second.value:,.2f}",
            f"{part.replicas * part.dollars_per_hour.value:,.2f}",
            console.number(part.images_per_dollar_gpu_only),
        )
    return table


def _rows(plan: Plan) -> dict[str, str]:
    return {
        "images": f"{plan.images:,}",
        "replicas": f"{plan.replicas:,}",
        "hours": f"{plan.hours:,.2f}",
        "GPU": f"${plan.gpu_dollars:,.2f}",
        "storage operations": f"${plan.storage_dollars:,.2f}",
        "all in": f"${plan.dollars:,.2f}",
        "images per dollar, GPU only": f"{plan.images_per_dollar_gpu_only:,.0f}",
        "images per dollar, all in": f"{plan.images_per_dollar:,.0f}",
    }

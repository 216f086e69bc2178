"""`imagefleet plan`: the duration, cost and replicas of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from fleet import console, options
from fleet.plan import estimate
from imagefleet import errors
from imagefleet.pricing import price_file, prices

_DEFAULT_GPU = "RTX 3060 Ti"
_NO_START_UP = estimate.Input(0.0, "assumed", "not included without --bench")


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
        float | None, typer.Option(min=0.0001, metavar="DOLLARS", help="$/h of one replica.")
    ] = None,
    prices_path: options.PriceFile = None,
    images_per_second: Annotated[
        float | None, typer.Option(min=0.0001, metavar="NUMBER", help="Speed of one replica.")
    ] = None,
    bench: options.BenchReports = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Number of replicas.")
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="HOURS", help="Plan enough replicas to finish in time."),
    ] = None,
    as_json: options.AsJson = False,
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
        benches = [estimate.read_bench(path, table) for path in bench or []]
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
            found = name
            if not has_own:  # a class with a report need not be in the table
                measured = prices.matching_gpus(name, [each.gpu for each in benches])
                found = measured[0] if measured else prices.find_gpu(name, table.gpus)
            made_on = estimate.bench_of(found, benches)
            speed = estimate.find_speed(found, images_per_second, made_on)
            price = estimate.find_price(found, known, price_per_hour, table)
            start_up = made_on.start_up if made_on else _NO_START_UP
            mix.append(estimate.Part(found, count, speed, price, start_up))
        estimate.refuse_unused(benches, {part.gpu for part in mix})
        images = jobs * images_per_job
        if deadline_hours is not None:
            mix = estimate.mix_for(images, mix, deadline_hours)
        plan = estimate.make_plan(jobs, images, mix, table)
    if as_json:
        console.print_json({**asdict(plan), "storage_prices": asdict(table.storage)})
    else:
        _show(plan, table)


def _named(
    names: list[str] | None, benches: Sequence[estimate.Bench], replicas: int | None
) -> list[tuple[str, int]]:
    """GPU classes as given, and the replicas of each."""
    named = []
    for text in names or [bench.gpu for bench in benches] or [_DEFAULT_GPU]:
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


def _show(plan: estimate.Plan, table: prices.PriceTable) -> None:
    rows = {
        "images": f"{plan.images:,}",
        "replicas": f"{plan.replicas:,}",
        "hours": f"{plan.hours:,.2f}",
        "GPU": f"${plan.gpu_dollars:,.2f}",
        "storage operations": f"${plan.storage_dollars:,.2f}",
        "all in": f"${plan.dollars:,.2f}",
        "images per dollar, GPU only": f"{plan.images_per_dollar_gpu_only:,.0f}",
        "images per dollar, all in": f"{plan.images_per_dollar:,.0f}",
    }
    console.print_tables(console.totals(rows))
    if len(plan.mix) > 1:
        console.print_tables("", _mix_table(plan.mix))
    console.print_tables("")
    for part in plan.mix:
        speed, price = part.images_per_second, part.dollars_per_hour
        start_up = part.start_up_seconds
        for text, each in (
            (f"{speed.value:g} images/s", speed),
            (f"${price.value:g}/h", price),
            (f"{start_up.value:g} s of start-up", start_up),
        ):
            line = f"{part.gpu}: {text}: {each.kind}: {each.source}."
            console.print_tables(line)
    console.print_tables(
        f"Storage operations: listed: {table.storage.source}.",
        "Interruptions, idle time, second drawings (`imagefleet load --verify-share`, by default"
        " 0.5 % more) and storing the images are not included.",
    )


def _mix_table(mix: Sequence[estimate.Part]) -> Table:
    headings = ("replicas", "images/s", "$/h", "images/$,\nGPU only")
    table = console.table(console.name_column("GPU"), *map(console.number_column, headings))
    for part in mix:
        table.add_row(
            part.gpu,
            f"{part.replicas:,}",
            f"{part.images_in(1):,.2f}",
            f"{part.replicas * part.dollars_per_hour.value:,.2f}",
            console.number(part.images_per_dollar_gpu_only),
        )
    return table

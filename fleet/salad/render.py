"""`imagefleet deploy apply --render`: the requests and the price of a fleet file, offline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from rich.table import Table

from fleet import console
from fleet.options import BenchReports, PriceFile, option
from fleet.plan import estimate, work
from fleet.salad import file as salad_file
from fleet.salad import gpus, groups
from imagefleet import errors
from imagefleet.pricing import families, prices


@dataclass(frozen=True, slots=True)
class Rendering:
    """The options of `deploy apply --render`."""

    render: bool = option(
        "Print the groups of the file and their price, by the built-in table or"
        " --price-file: makes no call and needs no API key.",
        default=False,
    )
    bench: BenchReports = None
    prices_path: PriceFile = None
    show_secrets: bool = option("Do not mask secrets.", default=False)


def render(file: Path | None, replicas: int | None, rendering: Rendering, *, as_json: bool) -> None:
    """Prints the groups of a fleet file, as `apply` creates them, and their price."""
    fleet_file = salad_file.read_file(file)
    table = prices.read_table(rendering.prices_path)
    classes = fleet_file.gpu_classes(gpus.built_in(table))
    served = fleet_file.served_models()
    benches = [estimate.read_bench(path, table) for path in rendering.bench or []]
    estimate.refuse_unused(benches, [each.name for each in classes])
    missing: list[str] = []

    def read_secret(source: salad_file.SecretSource) -> SecretStr:
        try:
            return fleet_file.secret(source)
        except errors.SetupError as error:
            if rendering.show_secrets:
                raise
            missing.append(error.message)
            return SecretStr(groups.MASKED)

    bodies = groups.render(fleet_file, classes, read_secret, replicas)
    shown = (groups.reveal if rendering.show_secrets else groups.mask)(bodies)
    total = sum(body["replicas"] for body in bodies)
    price = gpus.replica_price(classes, fleet_file.priority).times(total)
    rows = [_row(each, fleet_file.priority, benches, served) for each in classes]
    for message in dict.fromkeys(missing):
        console.print_note(f"{message}: `apply` needs it; with it, the groups' revision differs")
    if as_json:
        console.print_json(
            {
                "groups": shown,
                "replicas": total,
                "dollars_per_hour": asdict(price),
                "gpus": rows,
                "models": [
                    {
                        "name": served_model.name,
                        "family": served_model.family.slug,
                        "queue": served_model.queue,
                    }
                    for served_model in served
                ],
            }
        )
        return
    console.print_json(shown)
    for served_model in served:
        console.print_tables(
            f"Serves {served_model.name} ({served_model.family.name}),"
            f" from the queue {served_model.queue}."
        )
    source = "; ".join(dict.fromkeys(table.gpus[each.name].source for each in classes))
    console.print_tables(
        f"{total:,} replicas at {fleet_file.priority} priority: {price}, {price.per_day} while all"
        " run.",
        _price_table(rows, total),
        f"Prices: {source}.",
    )
    if not benches:
        console.print_tables(
            "For images per dollar give --bench, the JSON of `imagefleet bench engine --json-file`."
        )


def _row(
    gpu: gpus.GpuClass,
    priority: str,
    benches: Sequence[estimate.Bench],
    served: Sequence[salad_file.Model],
) -> dict[str, Any]:
    """The price and the speed of one replica of a class; None for what is not known.

    The speed is that of the slowest of its models.
    """
    dollars = gpu.dollars_per_hour[priority]
    speeds = [
        estimate.find_speed(gpu.name, None, bench, work.of_count(1, 1, family)[0]).value
        for family in {each.family for each in served} or {families.SD1}
        if (bench := estimate.bench_of(gpu.name, benches, family)) is not None
    ]
    speed = min(speeds, default=None)
    return {
        "gpu": gpu.name,
        "dollars_per_hour": dollars,
        "images_per_second": speed,
        "images_per_dollar_gpu_only": speed * 3600 / dollars if speed and dollars else None,
    }


def _price_table(rows: Sequence[dict[str, Any]], replicas: int) -> Table:
    headings = ("$/h each", f"$/h for {replicas:,}", "images/s each", "images/$,\nGPU only")
    table = console.table(console.name_column("GPU"), *map(console.number_column, headings))
    for row in rows:
        table.add_row(
            row["gpu"],
            f"{row['dollars_per_hour']:g}",
            f"{row['dollars_per_hour'] * replicas:,.2f}",
            console.number(row["images_per_second"], 2),
            console.number(row["images_per_dollar_gpu_only"]),
        )
    return table

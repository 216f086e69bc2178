"""`imagefleet top`: the workers, the slowest first."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleet import console, options
from fleet.monitor import prometheus, rates
from fleet.monitor import watch as watching
from fleet.settings import MonitorSettings
from imagefleet import errors


@options.from_settings(MonitorSettings)
def command(
    settings: MonitorSettings,
    count: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Workers shown.")] = 20,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, of all workers.")] = False,
) -> None:
    """Shows the workers, the slowest first, by their metrics.

    imagefleet top --prometheus http://localhost:9090 --watch
    """
    if watch and as_json:
        raise errors.SetupError("--watch is for people and --json for programs: choose one")
    if settings.prometheus is None:
        raise errors.SetupError(
            "workers are told apart by their metrics alone: give --prometheus, the address of a"
            " Prometheus or VictoriaMetrics that has them"
        )
    console.run(_show(settings.prometheus, count, watch=watch, as_json=as_json))


async def _show(url: str, count: int, *, watch: bool, as_json: bool) -> None:
    async with prometheus.connected(url) as server:
        if watch:
            await watching.watch(lambda: _look(server, count))
        elif as_json:
            workers = await rates.worker_rates(server)
            console.print_json({"workers": [asdict(each) for each in workers]})
        else:
            console.stdout.print(await _look(server, count))


async def _look(server: prometheus.Prometheus, count: int) -> Group:
    return screen(await rates.worker_rates(server), count)


def screen(workers: list[rates.WorkerRates], count: int) -> Group:
    """The first *count* of them, and how many there are."""
    table = Table()
    for heading in ("worker", "GPU", "group"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for heading in ("images/s", "idle", "images/$", "failed/h"):
        table.add_column(heading, justify="right")
    for each in workers[:count]:
        table.add_row(
            each.worker,
            each.gpu,
            each.group,
            f"{each.images_per_second:.2f}",
            console.percent(each.gpu_idle_fraction),
            console.number(each.images_per_dollar),
            console.number(each.failed_jobs),
        )
    shown = min(count, len(workers))
    return Group(table, Text(f"{shown} of {console.counted(len(workers), 'worker')}"))

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
from fleet.monitor.settings import MonitorSettings
from imagefleet import errors


@options.from_settings(MonitorSettings)
def command(
    settings: MonitorSettings,
    count: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Workers shown.")] = 20,
    watch: watching.Watch = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all workers as JSON.")] = False,
) -> None:
    """Shows the workers by their metrics, the slowest first.

    imagefleet top --prometheus http://localhost:9090 --watch
    """
    watching.check_flags(watch=watch, as_json=as_json)
    if settings.prometheus is None:
        raise errors.SetupError(
            "top reads the workers' metrics: give --prometheus, the URL of a Prometheus or"
            " VictoriaMetrics that has them"
        )
    console.run(_show(settings.prometheus, count, watch=watch, as_json=as_json))


async def _show(url: str, count: int, *, watch: bool, as_json: bool) -> None:
    async with prometheus.connected(url) as server:
        await watching.show(
            lambda: rates.worker_rates(server),
            lambda workers: screen(workers, count),
            lambda workers: {"workers": [asdict(each) for each in workers]},
            is_live=watch,
            as_json=as_json,
        )


def screen(workers: list[rates.WorkerRates], count: int) -> Group:
    """The first *count* workers, and the number of all."""
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

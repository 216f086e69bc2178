"""The workers by their metrics, the slowest first: `imagefleet status --workers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from fleet import console
from fleet.monitor import prometheus, rates
from fleet.monitor import watch as watching
from fleet.settings import MonitorSettings
from imagefleet import errors

_NAMES = ("worker", "GPU", "group")
_FIGURES = ("images/s", "idle", "images/$", "failed/h")

#: Columns between two columns of `console.table`.
_GAP = 2


async def show(settings: MonitorSettings, count: int, *, watch: bool, as_json: bool) -> None:
    """Shows the first *count* workers; reads nothing but the metrics."""
    if settings.prometheus is None:
        raise errors.SetupError(
            "--workers reads the workers' metrics: give --prometheus, the URL of a Prometheus or"
            " VictoriaMetrics that has them"
        )
    async with prometheus.connected(settings.prometheus, settings.queried_fleet) as server:

        async def read() -> tuple[list[rates.WorkerRates], str | None]:
            workers = await rates.worker_rates(server)
            return workers, await rates.left_out(server, datetime.now(UTC))

        def screen(found: tuple[list[rates.WorkerRates], str | None]) -> Group:
            left_out = [console.untrusted(found[1], "yellow")] if found[1] else []
            return Group(workers_screen(found[0], count), *left_out)

        def record(found: tuple[list[rates.WorkerRates], str | None]) -> dict[str, Any]:
            return {"workers": [asdict(worker) for worker in found[0]], "left_out": found[1]}

        await watching.show(read, screen, record, is_live=watch, as_json=as_json)


class WorkersTable:
    """A row per worker in the width there is: figures are whole, and as many names as fit.

    In a narrow terminal the group is left out first, then the GPU; at last a worker's name, which
    is its machine and its process, loses its middle.
    """

    def __init__(self, workers: Sequence[rates.WorkerRates]) -> None:
        self._names = [(each.worker, each.gpu, each.group) for each in workers]
        self._figures = [
            (
                f"{worker.images_per_second:.2f}",
                console.percent(worker.gpu_idle_fraction),
                console.number(worker.images_per_dollar),
                console.number(worker.failed_jobs),
            )
            for worker in workers
        ]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width)

    def table(self, width: int) -> Table:
        figures = _widths(_FIGURES, self._figures)
        names = _widths(_NAMES, self._names)
        left = width - sum(figures) - _GAP * len(figures)
        shown = next((each for each in (3, 2) if sum(names[:each]) + _GAP * (each - 1) <= left), 1)
        room = max(left, len(_NAMES[0])) if shown == 1 else names[0]
        table = console.table(
            *map(console.name_column, _NAMES[:shown]), *map(console.number_column, _FIGURES)
        )
        for (worker, *others), row in zip(self._names, self._figures, strict=True):
            cells = (_shortened(worker, room), *others[: shown - 1], *row)
            table.add_row(*map(console.untrusted, cells))
        return table


def workers_screen(workers: list[rates.WorkerRates], count: int) -> Group:
    """The first *count* workers, and the number of all."""
    shown = min(count, len(workers))
    return Group(
        WorkersTable(workers[:count]),
        Text(f"{shown} of {console.counted(len(workers), 'worker')}"),
    )


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]


def _shortened(name: str, width: int) -> str:
    """*name* without its middle: its ends tell machines and processes apart."""
    if cell_len(name) <= width:
        return name
    tail = (width - 1) // 3
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"

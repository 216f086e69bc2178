"""`imagefleet status`, `top` and `exporter`: the state of the queues and of the workers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from fleet import console, options
from fleet.monitor import prometheus, rates
from fleet.monitor import watch as watching
from fleet.monitor.settings import ExporterSettings, MonitorSettings
from imagefleet import aio, concurrency, errors
from imagefleet.storage.protocol import QueueDepth
from imagefleet.telemetry import logs, serving

log = logging.getLogger(__name__)

#: The columns of `top`.
_NAMES = ("worker", "GPU", "group")
_FIGURES = ("images/s", "idle", "images/$", "failed/h")

#: Columns between two columns of `console.table`.
_GAP = 2

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue's depth; None for what the storage does not report.

    *model* is that of its jobs, None where they name none; *shards* are the queues of the storage
    that it consists of.
    """

    name: str
    messages: int
    visible: int | None
    leased: int | None
    oldest_age_seconds: float | None
    model: str | None = None
    shards: int = 1


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model whose jobs wait, and which no worker serves."""

    model: str
    messages: int


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The job queues and their poison queue; *fleet* only with a Prometheus.

    *queue* is the sum of *queues*, which are in the order in which workers take jobs.
    *without_worker* are the models whose jobs wait until somebody starts a worker for them.
    """

    storage: str
    queue: QueueStatus
    failed: QueueStatus
    fleet: rates.FleetRates | None = None
    queues: Sequence[QueueStatus] = ()
    without_worker: Sequence[WaitingModel] = ()


@options.from_settings(MonitorSettings)
def status_command(
    settings: MonitorSettings,
    watch: watching.Watch = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows the waiting, leased and failed jobs.

    With --prometheus also the fleet's images/s and images per dollar.

    imagefleet status --watch

    imagefleet status --prometheus http://localhost:9090 --json
    """
    console.run(_show_status(settings, watch=watch, as_json=as_json))


@options.from_settings(MonitorSettings)
def top_command(
    settings: MonitorSettings,
    count: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Workers shown.")] = 20,
    watch: watching.Watch = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all workers as JSON.")] = False,
) -> None:
    """Shows the workers by their metrics, the slowest first.

    imagefleet top --prometheus http://localhost:9090 --watch
    """
    if settings.prometheus is None:
        raise errors.SetupError(
            "top reads the workers' metrics: give --prometheus, the URL of a Prometheus or"
            " VictoriaMetrics that has them"
        )
    server = prometheus.connected(settings.prometheus, settings.queried_fleet)
    console.run(_show_workers(server, count, watch=watch, as_json=as_json))


@options.from_settings(ExporterSettings)
def exporter_command(settings: ExporterSettings) -> None:
    """Exports queue depths, and the time and cost to empty them.

    A fleet needs one. It serves /metrics on --port and pushes them to --push-url if given. With
    --prometheus it takes the completion rate from the workers' metrics instead of deriving it
    from the queue depth.

    imagefleet exporter --prometheus http://localhost:9090
    """
    logs.configure(settings.log_format)
    console.run(_export(settings))


async def read_status(
    client: aio.Fleet, server: prometheus.Prometheus | None = None
) -> FleetStatus:
    """Reads the depth of the queues and, with a *server*, the fleet's rates."""
    depth, storage = await client.depth(), client.storage
    return FleetStatus(
        storage.url,
        replace(_queue_status(storage.queue.name, depth.queue), shards=1),
        _queue_status(storage.poison.name, depth.failed),
        await rates.fleet_rates(server) if server else None,
        [_queue_status(name, each) for name, each in depth.queue.by_queue.items()],
        await _without_worker(client, depth.queue),
    )


async def _without_worker(client: aio.Fleet, depth: QueueDepth) -> list[WaitingModel]:
    """Models with jobs but no worker, by what workers note every ten minutes."""
    waiting: Counter[str] = Counter()
    for each in depth.by_queue.values():
        if each.model is not None and each.messages:
            waiting[each.model] += each.messages

    async def is_served(model: str) -> bool:
        return await client.run(serving.is_served(client.storage.blobs, model))

    served = await concurrency.gather(*(is_served(model) for model in waiting))
    return [
        WaitingModel(model, messages)
        for (model, messages), is_one in zip(waiting.items(), served, strict=True)
        if not is_one
    ]


class WorkersTable:
    """A row per worker in the width there is: figures are whole, and as many names as fit.

    In a narrow terminal the group is left out first, then the GPU; at last a worker's name, which
    is its machine and its process, loses its middle.
    """

    def __init__(self, workers: Sequence[rates.WorkerRates]) -> None:
        self._names = [(each.worker, each.gpu, each.group) for each in workers]
        self._figures = [
            (
                f"{each.images_per_second:.2f}",
                console.percent(each.gpu_idle_fraction),
                console.number(each.images_per_dollar),
                console.number(each.failed_jobs),
            )
            for each in workers
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


async def _show_status(settings: MonitorSettings, *, watch: bool, as_json: bool) -> None:
    async with (
        console.connected(settings) as client,
        prometheus.connected_if(settings.prometheus, settings.queried_fleet) as server,
    ):
        await watching.show(
            lambda: read_status(client, server),
            _status_screen,
            asdict,
            is_live=watch,
            as_json=as_json,
        )


async def _show_workers(
    connecting: AbstractAsyncContextManager[prometheus.Prometheus],
    count: int,
    *,
    watch: bool,
    as_json: bool,
) -> None:
    async with connecting as server:

        async def read() -> tuple[list[rates.WorkerRates], str | None]:
            workers = await rates.worker_rates(server)
            return workers, await rates.left_out(server, datetime.now(UTC))

        await watching.show(
            read,
            lambda found: Group(workers_screen(found[0], count), *_notes(found[1])),
            lambda found: {"workers": [asdict(each) for each in found[0]], "left_out": found[1]},
            is_live=watch,
            as_json=as_json,
        )


async def _export(settings: ExporterSettings) -> None:
    from fleet.monitor.queue_flow import Exporter
    from imagefleet.telemetry import probes, push

    async with (
        console.connected(settings) as client,
        prometheus.connected_if(settings.prometheus, settings.queried_fleet) as server,
    ):
        storage = client.storage
        exporter = Exporter(storage, settings, server)
        async with (
            probes.serving(
                exporter.registry,
                is_live=lambda: True,
                is_ready=lambda: exporter.has_sampled,
                host=settings.host,
                port=settings.port,
            ) as port,
            push.pushing(exporter.registry, settings, job="imagefleet-exporter"),
        ):
            log.info(
                "sampling %s of %s; metrics at http://%s:%d/metrics",
                storage.queue.name,
                storage.url,
                settings.host,
                port,
                extra={"action": "start", "port": port},
            )
            await console.until_stopped(asyncio.create_task(exporter.run(), name="exporter"))


def _queue_status(name: str, depth: QueueDepth) -> QueueStatus:
    visible = None if depth.leased is None else depth.messages - depth.leased
    return QueueStatus(
        name,
        depth.messages,
        visible,
        depth.leased,
        depth.oldest_age_seconds,
        depth.model,
        max(1, len(depth.by_queue)),
    )


def _status_screen(status: FleetStatus) -> Group:
    headings = ("messages", "visible", "leased", "oldest")
    table = console.table(console.name_column("queue"), *map(console.number_column, headings))
    shown_queues = [each for each in status.queues if each.model is None or each.messages]
    for each in (*(shown_queues or [status.queue]), status.failed):
        counts = [each.messages, each.visible, each.leased]
        shown = ["?" if count is None else f"{count:,}" for count in counts]
        shards = f" ({each.shards} shards)" if each.shards > 1 else ""
        table.add_row(each.name + shards, *shown, _age(each.oldest_age_seconds))
    parts: list[Text | Table] = [console.untrusted(status.storage, "bold"), table]
    for waiting in status.without_worker:
        jobs = console.counted(waiting.messages, "job")
        sentence = (
            f"{jobs} of the model {waiting.model}, which no worker serves: start one with"
            " that --model"
        )
        parts += _notes(sentence)
    if (fleet := status.fleet) is not None:
        rows = {
            "workers": console.number(fleet.workers),
            "images/s": console.number(fleet.images_per_second, 2),
            "images per dollar, GPU only": console.number(fleet.images_per_dollar_gpu_only),
            "images per dollar, all in": console.number(fleet.images_per_dollar),
            "$/h": console.number(fleet.dollars_per_hour, 2),
            "GPU idle": console.percent(fleet.gpu_idle_fraction),
        }
        parts.append(console.totals(rows))
        parts += _notes(fleet.left_out)
    return Group(*parts)


def _notes(sentence: str | None) -> list[Text]:
    return [console.untrusted(sentence, "yellow")] if sentence else []


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"

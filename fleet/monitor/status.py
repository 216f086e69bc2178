"""`imagefleet status`: waiting, leased and failed jobs, and the fleet's rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fleet import console, options
from fleet.monitor import prometheus, rates
from fleet.monitor import watch as watching
from fleet.monitor.settings import MonitorSettings
from imagefleet import aio
from imagefleet.storage.protocol import QueueDepth

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue's depth; None for what the storage does not report."""

    name: str
    messages: int
    visible: int | None
    leased: int | None
    oldest_age_seconds: float | None


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The job queue and its poison queue; *fleet* only with a Prometheus."""

    storage: str
    queue: QueueStatus
    failed: QueueStatus
    fleet: rates.FleetRates | None = None


async def read_status(
    client: aio.Fleet, server: prometheus.Prometheus | None = None
) -> FleetStatus:
    """Reads the depth of both queues and, with a *server*, the fleet's rates."""
    depth, storage = await client.depth(), client.storage
    return FleetStatus(
        storage.url,
        _status(storage.queue.name, depth.queue),
        _status(storage.poison.name, depth.failed),
        await rates.fleet_rates(server) if server else None,
    )


@options.from_settings(MonitorSettings)
def command(
    settings: MonitorSettings,
    watch: watching.Watch = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows the waiting, leased and failed jobs.

    With --prometheus also the fleet's images/s and images per dollar.

    imagefleet status --watch

    imagefleet status --prometheus http://localhost:9090 --json
    """
    watching.check_flags(watch=watch, as_json=as_json)
    console.run(_show(settings, watch=watch, as_json=as_json))


def _status(name: str, depth: QueueDepth) -> QueueStatus:
    visible = None if depth.leased is None else depth.messages - depth.leased
    return QueueStatus(name, depth.messages, visible, depth.leased, depth.oldest_age_seconds)


async def _show(settings: MonitorSettings, *, watch: bool, as_json: bool) -> None:
    async with (
        console.connected(settings) as client,
        prometheus.connected_if(settings.prometheus) as server,
    ):
        await watching.show(
            lambda: read_status(client, server), _screen, asdict, is_live=watch, as_json=as_json
        )


def _screen(status: FleetStatus) -> Group:
    table = Table()
    table.add_column("queue")
    for heading in ("messages", "visible", "leased", "oldest"):
        table.add_column(heading, justify="right")
    for each in (status.queue, status.failed):
        table.add_row(
            each.name,
            _count(each.messages),
            _count(each.visible),
            _count(each.leased),
            _age(each.oldest_age_seconds),
        )
    parts: list[Text | Table] = [Text(status.storage, style="bold"), table]
    if status.fleet is not None:
        parts.append(_fleet_table(status.fleet))
    return Group(*parts)


def _fleet_table(fleet: rates.FleetRates) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    rate = fleet.images_per_second
    dollars = fleet.dollars_per_hour
    table.add_row("workers", console.number(fleet.workers))
    table.add_row("images/s", "-" if rate is None else f"{rate:,.2f}")
    table.add_row("images per dollar, GPU only", console.number(fleet.images_per_dollar_gpu_only))
    table.add_row("images per dollar, all in", console.number(fleet.images_per_dollar))
    table.add_row("$/h", "-" if dollars is None else f"{dollars:,.2f}")
    table.add_row("GPU idle", console.percent(fleet.gpu_idle_fraction))
    return table


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"

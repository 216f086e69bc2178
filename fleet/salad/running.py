"""`imagefleet deploy salad scale`, `status`, `drain` and `delete`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group as Screen
from rich.table import Table
from rich.text import Text

from fleet import console
from fleet.monitor import watch as watching
from fleet.options import AsJson
from fleet.salad import deployment, gpus
from fleet.salad import options as salad_options
from fleet.salad import price as salad_price
from fleet.salad.options import File, WaitMinutes, Yes
from fleet.salad.records import Group, Quota


def scale(
    replicas: Annotated[int, typer.Argument(min=0, help="Total of all groups.")],
    file: File = None,
    yes: Yes = False,
) -> None:
    """Changes the replicas in place, without restarting workers.

    imagefleet deploy salad scale 300
    """
    console.run(_scale(file, replicas, yes=yes))


def status(
    file: File = None,
    watch: watching.Watch = False,
    as_json: AsJson = False,
) -> None:
    """Shows the groups, their instances and the current cost.

    imagefleet deploy salad status --watch
    """
    with console.one_line_errors():
        watching.check_flags(watch=watch, as_json=as_json)
    console.run(_status(file, watch=watch, as_json=as_json))


def drain(file: File = None, wait_minutes: WaitMinutes = 15, yes: Yes = False) -> None:
    """Stops all workers, then the groups.

    A stopped group costs nothing; `apply` starts it again. Jobs that a worker cannot release in
    time return to the queue when their leases end.

    imagefleet deploy salad drain
    """
    console.run(_drain(file, wait_minutes * 60, yes=yes))


def delete(file: File = None, wait_minutes: WaitMinutes = 15, yes: Yes = False) -> None:
    """Deletes all groups of the fleet.

    Run `drain` first, so that no work is lost.

    imagefleet deploy salad delete
    """
    console.run(_delete(file, wait_minutes * 60, yes=yes))


async def _scale(path: Path | None, replicas: int, *, yes: bool) -> None:
    file, folder = salad_options.read_file(path)
    async with salad_options.connected(file, folder) as fleet:
        groups, known, quota = await asyncio.gather(
            fleet.existing_groups(), fleet.client.gpu_classes(), fleet.client.quota()
        )
        deployment.refuse_unscalable(groups, replicas)
        more = replicas - sum(group.replicas for group in groups)
        deployment.refuse_over_quota(more, quota)
        price = salad_price.group_price(groups[0], known)
        cost = f"{price.times(replicas)} while all run" if price else "unknown price"
        console.print_note(f"{replicas:,} replicas, {more:+,}: {cost}")
        if more > 0 or any(group.is_stopped for group in groups):
            salad_options.confirm("Scale?", yes=yes)
        await fleet.scale(replicas, groups)


async def _status(path: Path | None, *, watch: bool, as_json: bool) -> None:
    file, folder = salad_options.read_file(path)
    async with salad_options.connected(file, folder) as fleet:
        # Read once: they hardly change, and each refresh counts against the rate limit.
        known, quota = await asyncio.gather(fleet.client.gpu_classes(), fleet.client.quota())

        await watching.show(
            fleet.groups,
            lambda groups: _screen(groups, known, quota),
            lambda groups: _record(groups, known, quota),
            is_live=watch,
            as_json=as_json,
        )


async def _drain(path: Path | None, wait_seconds: float, *, yes: bool) -> None:
    file, folder = salad_options.read_file(path)
    async with salad_options.connected(file, folder) as fleet:
        groups = await fleet.existing_groups()
        running = sum(group.running for group in groups)
        if running:
            salad_options.confirm(f"Stop {console.counted(running, 'running worker')}?", yes=yes)
        await fleet.drain(wait_seconds)


async def _delete(path: Path | None, wait_seconds: float, *, yes: bool) -> None:
    file, folder = salad_options.read_file(path)
    async with salad_options.connected(file, folder) as fleet:
        groups = await fleet.existing_groups()
        running = sum(group.running for group in groups)
        salad_options.confirm(
            f"Delete {console.counted(len(groups), 'group')} of {file.name}"
            f" ({console.counted(running, 'running worker')})?",
            yes=yes,
        )
        await fleet.delete([group.name for group in groups], wait_seconds)


def _dollars(groups: Sequence[Group], known: Sequence[gpus.GpuClass]) -> salad_price.PriceRange:
    """The price of the running instances: only those are billed."""
    prices = [
        price.times(group.running)
        for group in groups
        if (price := salad_price.group_price(group, known))
    ]
    return salad_price.PriceRange(
        sum(each.least for each in prices), sum(each.most for each in prices)
    )


def _record(
    groups: Sequence[Group], known: Sequence[gpus.GpuClass], quota: Quota
) -> Mapping[str, Any]:
    hidden = {"environment", "image"}
    return {
        "groups": [
            {name: value for name, value in asdict(group).items() if name not in hidden}
            | {"gpus": _names(group, known)}
            for group in groups
        ],
        "replicas": sum(group.replicas for group in groups),
        "running": sum(group.running for group in groups),
        "dollars_per_hour": asdict(_dollars(groups, known)),
        "quota": asdict(quota),
    }


def _names(group: Group, known: Sequence[gpus.GpuClass]) -> list[str]:
    names = {each.id: each.name for each in known}
    return [names.get(uuid, uuid) for uuid in group.gpu_ids]


def _screen(groups: Sequence[Group], known: Sequence[gpus.GpuClass], quota: Quota) -> Screen:
    table = Table()
    table.add_column("group", overflow="fold")
    table.add_column("state")
    for heading in ("replicas", "running", "creating", "allocating", "stopping"):
        table.add_column(heading, justify="right")
    for group in groups:
        counts = (
            group.replicas, group.running, group.creating, group.allocating, group.stopping
        )  # fmt: skip
        table.add_row(group.name, group.status, *(f"{each:,}" for each in counts))
    running = sum(group.running for group in groups)
    replicas = sum(group.replicas for group in groups)
    classes = sorted({name for group in groups for name in _names(group, known)})
    lines = [
        f"{running:,} of {replicas:,} replicas run: {_dollars(groups, known)} now",
        f"GPU classes: {', '.join(classes) or 'none'}",
        f"quota: {quota.used:,} of {console.counted(quota.replicas, 'replica')} used",
    ]
    return Screen(table, *(Text(line) for line in lines))

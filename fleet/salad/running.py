"""Groups that run: `imagefleet deploy status` and `drain`, and the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group as Screen

from fleet import console
from fleet.monitor import watch as watching
from fleet.options import AsJson, Yes
from fleet.salad import deployment, gpus
from fleet.salad import options as salad_options
from fleet.salad.groups import Group, Quota, split
from fleet.salad.options import File, WaitMinutes
from imagefleet import concurrency, errors


async def resize(
    file: Path | None, replicas: int, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Sets the number of replicas in place, without restarting workers."""
    fleet_file, folder = salad_options.read_file(file)
    async with salad_options.connected(fleet_file, folder) as fleet:
        groups, known, quota = await concurrency.gather(
            fleet.existing_groups(), fleet.client.gpu_classes(), fleet.client.quota()
        )
        deployment.refuse_unscalable(groups, replicas)
        more = replicas - sum(group.replicas for group in groups)
        deployment.refuse_over_quota(more, quota)
        price = groups[0].price(known)
        cost = f"{price.times(replicas)} while all run" if price else "unknown price"
        console.print_note(f"{replicas:,} replicas, {more:+,}: {cost}")
        if dry_run:
            parts = split(replicas, len(groups))
            shares = {group.name: part for group, part in zip(groups, parts, strict=True)}
        else:
            if more > 0 or any(group.is_stopped for group in groups):
                console.confirm("Resize?", yes=yes)
            shares = await fleet.scale(replicas, groups)
    if as_json:
        console.print_json(
            {
                "replicas": replicas,
                "more_replicas": more,
                "groups": shares,
                "dollars_per_hour": asdict(price.times(replicas)) if price else None,
            }
        )


@console.synchronous
async def status(file: File = None, watch: watching.Watch = False, as_json: AsJson = False) -> None:
    """Shows the groups, their instances and the current cost.

    imagefleet deploy status --follow
    """
    fleet_file, folder = salad_options.read_file(file)
    async with salad_options.connected(fleet_file, folder) as fleet:
        # Read once: they hardly change, and each refresh counts against the rate limit.
        known, quota = await concurrency.gather(fleet.client.gpu_classes(), fleet.client.quota())
        await watching.show(
            fleet.groups,
            lambda groups: _screen(groups, known, quota),
            lambda groups: _record(groups, known, quota),
            is_live=watch,
            as_json=as_json,
        )


@console.synchronous
async def drain(
    file: File = None,
    wait_minutes: WaitMinutes = 15,
    delete: Annotated[
        bool, typer.Option("--delete", help="Then delete the groups, also after a vain wait.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Stops all workers, then the groups.

    A stopped group costs nothing; `apply` starts it again. Jobs that a worker cannot release in
    time return to the queue when their leases end.

    imagefleet deploy drain

    imagefleet deploy drain --delete
    """
    fleet_file, folder = salad_options.read_file(file)
    async with salad_options.connected(fleet_file, folder) as fleet:
        groups = await fleet.existing_groups()
        names = [group.name for group in groups]
        running = sum(group.running for group in groups)
        workers = console.counted(running, "running worker")
        if delete:
            of_fleet = f"{console.counted(len(groups), 'group')} of {fleet_file.name}"
            console.confirm(f"Stop and delete {of_fleet} ({workers})?", yes=yes)
        elif running:
            console.confirm(f"Stop {workers}?", yes=yes)
        try:
            await fleet.drain(wait_minutes * 60)
        except errors.TransientError as error:
            if not delete:
                raise
            console.print_warning(error.message)
        if delete:
            await fleet.delete(names, wait_minutes * 60)
    if as_json:
        console.print_json({"drained": names, "deleted": names if delete else []})


def _dollars(groups: Sequence[Group], known: Sequence[gpus.GpuClass]) -> gpus.PriceRange:
    """The price of the running instances: only those are billed."""
    prices = [price.times(group.running) for group in groups if (price := group.price(known))]
    return gpus.PriceRange(sum(each.least for each in prices), sum(each.most for each in prices))


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
    table = console.table(
        console.name_column("group"),
        console.number_column("replicas"),
        console.number_column("running"),
        "state",
    )
    for group in groups:
        counts = {name: getattr(group, name) for name in ("allocating", "creating", "stopping")}
        others = [f"{count:,} {name}" for name, count in counts.items() if count]
        table.add_row(
            console.untrusted(group.name),
            f"{group.replicas:,}",
            f"{group.running:,}",
            console.untrusted(", ".join([group.status, *others])),
        )
    running = sum(group.running for group in groups)
    replicas = sum(group.replicas for group in groups)
    classes = sorted({name for group in groups for name in _names(group, known)})
    lines = [
        f"{running:,} of {replicas:,} replicas run: {_dollars(groups, known)} now",
        f"GPU classes: {', '.join(classes) or 'none'}",
        f"quota: {quota.used:,} of {console.counted(quota.replicas, 'replica')} used",
    ]
    return Screen(table, *map(console.untrusted, lines))

"""`imagefleet deploy`: turns a fleet file into container groups, and keeps them in sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Group as Screen

from fleet import console, options
from fleet.monitor import watch as watching
from fleet.options import AsJson, Yes, option
from fleet.salad import deployment, gpus, groups
from fleet.salad import file as salad_file
from fleet.salad.file import File, WaitMinutes
from fleet.salad.groups import Group, Quota, split
from fleet.salad.render import Rendering, render
from imagefleet import concurrency, errors

app = typer.Typer(
    no_args_is_help=True,
    help="Deploys workers to SaladCloud: the container groups of a fleet, from one fleet file.",
    epilog="To roll out a change, edit the file and `apply` it again.",
)


@dataclass(frozen=True, slots=True)
class Change:
    """How many replicas there shall be, and how old ones give way to new ones."""

    replicas: int | None = option(
        "Overrides the file's replicas.", min=1, max=50_000, metavar="COUNT"
    )
    resize: int | None = option(
        "Set the total of replicas in place, and change nothing else.",
        min=0,
        max=50_000,
        metavar="COUNT",
    )
    enough: float = option(
        "Share of new replicas that must run before old ones are drained.", 0.8, min=0, max=1
    )
    wait_minutes: WaitMinutes = 60


@app.command()
@options.flat
async def apply(
    change: Change,
    rendering: Rendering,
    file: File = None,
    dry_run: bool = options.dry_run("the changes and their price"),
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Creates the groups, or changes what differs from the file.

    Replicas are changed in place. Any other change restarts workers, so it creates new groups, and
    drains and deletes the old ones once enough of the new replicas run. After a failure, run it
    again. With --resize only the number of replicas changes; `imagefleet scale` sets it by the
    queue instead, again and again.

    imagefleet deploy apply --render

    imagefleet deploy apply --dry-run

    imagefleet deploy apply --replicas 20 --yes

    imagefleet deploy apply --resize 300
    """
    if change.resize is not None and (change.replicas is not None or rendering.render):
        raise errors.SetupError("--resize changes nothing else: leave out --replicas and --render")
    if rendering.render:
        render(file, change.replicas, rendering, as_json=as_json)
    elif change.resize is not None:
        await _resize(file, change.resize, dry_run=dry_run, yes=yes, as_json=as_json)
    elif rendering != Rendering():
        raise errors.SetupError("--bench, --price-file and --show-secrets go with --render")
    else:
        await _apply(file, change, dry_run=dry_run, yes=yes, as_json=as_json)


async def _apply(
    file: Path | None, change: Change, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    fleet_file = salad_file.read_file(file)
    async with deployment.connected(fleet_file) as fleet:
        known, existing, quota = await concurrency.gather(
            fleet.client.gpu_classes(), fleet.groups(), fleet.client.quota()
        )
        classes = fleet_file.gpu_classes(known)
        bodies = groups.render(
            fleet_file,
            classes,
            fleet_file.secret,
            change.replicas,
            existing=[group.name for group in existing],
        )
        plan = deployment.changes(bodies, existing)
        price = gpus.replica_price(classes, fleet_file.priority).times(
            sum(body["replicas"] for body in bodies)
        )
        if plan:
            for line in _plan_lines(plan):
                console.print_note(line)
            deployment.refuse_over_quota(plan.more_replicas, quota)
            cost = f"cost: {price}, {price.per_day} while all replicas run"
            if plan.old:
                old = sum(group.replicas for group in plan.old)
                cost += f"; plus {old:,} old replicas until drained"
            console.print_note(cost)
        else:
            console.print_note(f"{fleet_file.name} is up to date")
        if plan and not dry_run:
            if plan.more_replicas > 0 or plan.start or plan.old:
                console.confirm("Apply?", yes=yes)
            await fleet.carry_out(plan)
            if plan.old:
                seconds = change.wait_minutes * 60
                await fleet.replace(plan.old, enough=change.enough, wait_seconds=seconds)
            console.print_note("done; `imagefleet deploy status --follow` shows the replicas start")
    if as_json:
        console.print_json({"fleet": fleet_file.name, "dry_run": dry_run, **_record(plan, price)})


def _plan_lines(plan: deployment.Changes) -> list[str]:
    lines = [
        f"to create: {body['name']} ({console.counted(body['replicas'], 'replica')})"
        for body in plan.create
    ]
    lines += [
        f"to change: {name}, to {console.counted(count, 'replica')}"
        for name, count in plan.resize.items()
    ]
    lines += [f"to start: {name}" for name in plan.start]
    lines += [f"to drain and delete after the change: {group.name}" for group in plan.old]
    return lines


def _record(plan: deployment.Changes, total: gpus.PriceRange) -> dict[str, Any]:
    return {
        "create": {body["name"]: body["replicas"] for body in plan.create},
        "resize": dict(plan.resize),
        "start": list(plan.start),
        "delete": [group.name for group in plan.old],
        "more_replicas": plan.more_replicas,
        "dollars_per_hour": asdict(total),
    }


async def _resize(
    file: Path | None, replicas: int, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Sets the number of replicas in place, without restarting workers."""
    fleet_file = salad_file.read_file(file)
    async with deployment.connected(fleet_file) as fleet:
        groups, known, quota = await concurrency.gather(
            fleet.existing_groups(), fleet.client.gpu_classes(), fleet.client.quota()
        )
        deployment.refuse_unscalable(groups, replicas)
        more = replicas - sum(group.replicas for group in groups)
        deployment.refuse_over_quota(more, quota)
        price = groups[0].price(known)
        cost = f"{price.times(replicas)} while all run" if price else "unknown price"
        console.print_note(f"{replicas:,} replicas, {more:+,}: {cost}")
        if not dry_run:
            if more > 0 or any(group.is_stopped for group in groups):
                console.confirm("Resize?", yes=yes)
            await fleet.scale(replicas, groups)
    if as_json:
        console.print_json(
            {
                "replicas": replicas,
                "more_replicas": more,
                "groups": dict(
                    zip((each.name for each in groups), split(replicas, len(groups)), strict=True)
                ),
                "dollars_per_hour": asdict(price.times(replicas)) if price else None,
            }
        )


@app.command()
@options.flat
async def status(file: File = None, watch: watching.Watch = False, as_json: AsJson = False) -> None:
    """Shows the groups, their instances and the current cost.

    imagefleet deploy status --follow
    """
    fleet_file = salad_file.read_file(file)
    async with deployment.connected(fleet_file) as fleet:
        # Read once: they hardly change, and each refresh counts against the rate limit.
        known, quota = await concurrency.gather(fleet.client.gpu_classes(), fleet.client.quota())
        await watching.show(
            fleet.groups,
            lambda groups: _screen(groups, known, quota),
            lambda groups: _status_record(groups, known, quota),
            is_live=watch,
            as_json=as_json,
        )


@app.command()
@options.flat
async def drain(
    file: File = None,
    wait_minutes: WaitMinutes = 15,
    delete: bool = option("Then delete the groups, also after a vain wait.", default=False),
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Stops all workers, then the groups.

    A stopped group costs nothing; `apply` starts it again. Jobs that a worker cannot release in
    time return to the queue when their leases end.

    imagefleet deploy drain

    imagefleet deploy drain --delete
    """
    fleet_file = salad_file.read_file(file)
    async with deployment.connected(fleet_file) as fleet:
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


def _status_record(
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
    rows = []
    for group in groups:
        counts = {name: getattr(group, name) for name in ("allocating", "creating", "stopping")}
        others = [f"{count:,} {name}" for name, count in counts.items() if count]
        state = ", ".join([group.status, *others])
        rows.append((group.name, group.replicas, group.running, state))
    figures = map(console.number_column, ("replicas", "running"))
    table = console.table(console.name_column("group"), *figures, "state", rows=rows)
    running = sum(group.running for group in groups)
    replicas = sum(group.replicas for group in groups)
    classes = sorted({name for group in groups for name in _names(group, known)})
    lines = [
        f"{running:,} of {replicas:,} replicas run: {_dollars(groups, known)} now",
        f"GPU classes: {', '.join(classes) or 'none'}",
        f"quota: {quota.used:,} of {console.counted(quota.replicas, 'replica')} used",
    ]
    return Screen(table, *map(console.untrusted, lines))

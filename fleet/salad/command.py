"""`imagefleet deploy`: turns a fleet file into container groups, and keeps them in sync."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fleet import console, options
from fleet.options import AsJson, Yes
from fleet.salad import deployment, gpus, groups, running
from fleet.salad import options as salad_options
from fleet.salad.options import File, WaitMinutes
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

    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=50_000, metavar="COUNT", help="Overrides the file's replicas."),
    ] = None
    resize: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=50_000,
            metavar="COUNT",
            help="Set the total of replicas in place, and change nothing else.",
        ),
    ] = None
    enough: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of new replicas that must run before old ones are drained."
        ),
    ] = 0.8
    wait_minutes: WaitMinutes = 60


@app.command()
@options.flat
def apply(
    change: Change,
    rendering: Rendering,
    file: File = None,
    dry_run: Annotated[bool, options.dry_run("the changes and their price")] = False,
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
        console.run(running.resize(file, change.resize, dry_run=dry_run, yes=yes, as_json=as_json))
    elif rendering != Rendering():
        raise errors.SetupError("--bench, --price-file and --show-secrets go with --render")
    else:
        console.run(_apply(file, change, dry_run=dry_run, yes=yes, as_json=as_json))


async def _apply(
    file: Path | None, change: Change, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    fleet_file, folder = salad_options.read_file(file)
    async with salad_options.connected(fleet_file, folder) as fleet:
        known, existing, quota = await concurrency.gather(
            fleet.client.gpu_classes(), fleet.groups(), fleet.client.quota()
        )
        classes = fleet_file.gpu_classes(known)
        bodies = groups.render(
            fleet_file,
            classes,
            lambda source: source.read(folder),
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
            console.print_note(_cost(plan, price))
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


for command in (running.status, running.drain):
    app.command()(command)


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


def _cost(plan: deployment.Changes, total: gpus.PriceRange) -> str:
    text = f"cost: {total}, {total.per_day} while all replicas run"
    if plan.old:
        text += f"; plus {sum(group.replicas for group in plan.old):,} old replicas until drained"
    return text


def _record(plan: deployment.Changes, total: gpus.PriceRange) -> dict[str, Any]:
    return {
        "create": {body["name"]: body["replicas"] for body in plan.create},
        "resize": dict(plan.resize),
        "start": list(plan.start),
        "delete": [group.name for group in plan.old],
        "more_replicas": plan.more_replicas,
        "dollars_per_hour": asdict(total),
    }

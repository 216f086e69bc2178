"""`imagefleet deploy`: turns a fleet file into container groups, and keeps them in sync."""

from collections.abc import Sequence
from dataclasses import asdict

import typer
from pydantic import SecretStr
from rich.console import Group as Screen

from cli import console, options
from cli.options import AsJson, Yes, option
from fleet.monitor import watch as watching
from fleet.salad import changes, deployment, gpus, groups
from fleet.salad import file as salad_file
from fleet.salad.file import File, FleetFile, WaitMinutes
from fleet.salad.groups import Groups, Quota
from imagefleet import concurrency
from imagefleet.errors import SetupError, TransientError
from imagefleet.pricing import prices
from imagefleet.validation import JSONDict, JSONObject

app = typer.Typer(
    no_args_is_help=True,
    help="Deploys workers to SaladCloud: the container groups of a fleet, from one fleet file.",
    epilog="To roll out a change, edit the file and `apply` it again.",
)


@app.command()
@options.flat
async def apply(
    file: File = None,
    replicas: int | None = option(
        "Overrides the file's replicas.", min=1, max=50_000, metavar="COUNT"
    ),
    wait_minutes: WaitMinutes = 60,
    render: bool = option(
        "Print the groups of the file and their price, by the built-in table: makes no"
        " call and needs no API key.",
        default=False,
    ),
    dry_run: bool = options.dry_run("the changes and their price"),
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Creates the groups, or changes what differs from the file.

    Replicas are changed in place. Any other change restarts workers, so new groups replace the old
    ones, a quarter at a time, each once four fifths of the new replicas run. There are never more
    replicas, or at a higher price, than before or as confirmed. After a failure, run it again.
    `imagefleet scale` sets the replicas by the queue, again and again.

    imagefleet deploy apply --render

    imagefleet deploy apply --dry-run

    imagefleet deploy apply --replicas 20 --yes
    """
    fleet_file = salad_file.read_file(file)
    if render:
        _render(fleet_file, replicas, as_json=as_json)
        return
    async with deployment.connected(fleet_file) as fleet:
        known, (existing, quota) = await concurrency.gather(
            fleet.client.gpu_classes(),
            concurrency.gather(fleet.groups(), fleet.client.quota()),
        )
        classes = fleet_file.gpu_classes(known)
        bodies = groups.render(fleet_file, classes, replicas, existing)
        room = quota.room(existing)
        plan = changes.applied(bodies, existing, room)
        total = sum(body["replicas"] for body in bodies)
        price = gpus.replica_price(classes, fleet_file.priority).times(total)
        if plan:
            console.print_note("\n".join(_plan_lines(plan)))
            changes.refuse_over_quota(plan, room, quota)
            console.print_note(f"cost: {price}, {price.per_day} while all replicas run")
        else:
            console.print_note(f"{fleet_file.name} is up to date")
            if not dry_run:
                await fleet.end_by(existing, None)
        if plan and not dry_run:
            if plan.new_replicas or plan.delete:
                console.confirm("Apply?", yes=yes)
            with console.only_one(salad_file.found(file)):
                await fleet.apply(plan, bodies, wait_minutes * 60)
            console.print_note(
                "done; `imagefleet deploy status --follow` shows the replicas start"
            )
    if as_json:
        console.print_json(
            {
                "fleet": fleet_file.name,
                "dry_run": dry_run,
                **asdict(plan),
                "dollars_per_hour": asdict(price),
            }
        )


def _plan_lines(plan: changes.Changes) -> list[str]:
    lines = [
        *(
            f"to create: {name}, {count:,} replicas"
            for name, count in plan.create.items()
        ),
        *(
            f"to change: {name}, to {count:,} replicas"
            for name, count in plan.resize.items()
        ),
        *(f"to start: {name}" for name in plan.start),
        *(f"to drain and delete: {name}" for name in plan.delete),
    ]
    if len(plan.steps) > 1:
        most = max(sum(step.values()) for step in plan.steps)
        stay = (
            f"{plan.least_replicas:,} stay"
            if plan.least_replicas
            else "for a while none runs"
        )
        lines.append(
            f"in {len(plan.steps)} steps, old replicas first, {most:,} at most: {stay}"
        )
    return lines


def _render(file: FleetFile, replicas: int | None, *, as_json: bool) -> None:
    """Prints the groups of a fleet file, as `apply` creates them, and their price."""
    classes = file.gpu_classes(gpus.built_in())
    missing = []

    def read_secret(source: salad_file.SecretSource) -> SecretStr:
        try:
            return source.read()
        except SetupError as error:
            missing.append(error.message)
            return SecretStr(groups.MASKED)

    bodies = groups.render(file, classes, replicas, read_secret=read_secret)
    shown = groups.plain(bodies, lambda _: groups.MASKED)
    total = sum(body["replicas"] for body in bodies)
    price = gpus.replica_price(classes, file.priority).times(total)
    dollars = {gpu.name: gpu.dollars_per_hour[file.priority] for gpu in classes}
    models = file.served_models()
    for message in dict.fromkeys(missing):
        console.print_note(
            f"{message}: `apply` needs it; with it, the groups' revision differs"
        )
    if as_json:
        record = {
            "groups": shown,
            "replicas": total,
            "dollars_per_hour": asdict(price),
            "gpus": [
                {"gpu": gpu, "dollars_per_hour": each} for gpu, each in dollars.items()
            ],
            "models": [
                asdict(model) | {"family": model.family.slug} for model in models
            ],
        }
        console.print_json(record)
        return
    console.print_json(shown)
    rows = ((gpu, f"{each:g}", f"{each * total:,.2f}") for gpu, each in dollars.items())
    console.print_tables(
        *(
            f"Serves {model.name} ({model.family.name}), from the queue {model.queue}."
            for model in models
        ),
        f"{total:,} replicas at {file.priority} priority: {price}, {price.per_day} while all run.",
        console.table(["GPU"], ["$/h each", f"$/h for {total:,}"], rows=rows),
        f"Prices: {prices.GPU_PRICES_SOURCE}. For images per dollar: `imagefleet plan`.",
    )


@app.command()
@options.flat
async def status(
    file: File = None, watch: watching.Watch = False, as_json: AsJson = False
) -> None:
    """Shows the groups, their instances and the current cost.

    imagefleet deploy status --follow
    """
    async with deployment.connected(salad_file.read_file(file)) as fleet:
        # Read once: they hardly change, and each refresh counts against the rate limit.
        known, quota = await concurrency.gather(
            fleet.client.gpu_classes(), fleet.client.quota()
        )

        async def read() -> JSONDict:
            return _record(await fleet.groups(), known, quota)

        await watching.show(read, _screen, is_live=watch, as_json=as_json)


@app.command()
@options.flat
async def drain(
    file: File = None,
    wait_minutes: WaitMinutes = 15,
    delete: bool = option(
        "Then delete the groups, also after a vain wait.", default=False
    ),
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
            console.confirm(
                f"Stop and delete {console.counted(len(groups), 'group')} of"
                f" {fleet_file.name} ({workers})?",
                yes=yes,
            )
        elif running:
            console.confirm(f"Stop {workers}?", yes=yes)
        try:
            await fleet.drain(wait_minutes * 60)
        except TransientError as error:
            if not delete:
                raise
            console.print_warning(error.message)
        if delete:
            await fleet.delete(names, wait_minutes * 60)
    if as_json:
        console.print_json({"drained": names, "deleted": names if delete else []})


def _record(groups: Groups, known: Sequence[gpus.GpuClass], quota: Quota) -> JSONDict:
    """The JSON of `deploy status`; only running instances are billed."""
    names = {gpu.id: gpu.name for gpu in known}
    prices = [
        price.times(group.running) for group in groups if (price := group.price(known))
    ]
    return {
        "groups": [
            group.model_dump()
            | {"gpus": [names.get(uuid, uuid) for uuid in group.gpu_ids]}
            for group in groups
        ],
        "replicas": sum(group.replicas for group in groups),
        "running": sum(group.running for group in groups),
        "dollars_per_hour": {
            "least": sum(price.least for price in prices),
            "most": sum(price.most for price in prices),
        },
        "quota": quota.model_dump(),
    }


def _screen(record: JSONObject) -> Screen:
    rows = []
    for group in record["groups"]:
        state = [
            group["status"],
            *(
                f"{group[name]:,} {name}"
                for name in ("allocating", "creating", "stopping")
                if group[name]
            ),
        ]
        rows.append(
            (group["name"], group["replicas"], group["running"], ", ".join(state))
        )
    table = console.table(["group"], ["replicas", "running"], ["state"], rows=rows)
    price = gpus.PriceRange(**record["dollars_per_hour"])
    classes = sorted({name for group in record["groups"] for name in group["gpus"]})
    quota = record["quota"]
    lines = [
        f"{record['running']:,} of {record['replicas']:,} replicas run: {price} now",
        f"GPU classes: {', '.join(classes) or 'none'}",
        f"quota: {quota['used']:,} of {console.counted(quota['replicas'], 'replica')} used",
    ]
    return Screen(table, *map(console.untrusted, lines))

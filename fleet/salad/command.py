"""`imagefleet deploy salad`: turns a fleet file into container groups, and keeps them in sync."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from fleet import console
from fleet.plan import inputs
from fleet.salad import deployment, gpus, groups, running
from fleet.salad import file as salad_file
from fleet.salad import options as salad_options
from fleet.salad import price as salad_price
from fleet.salad.options import File, Replicas, WaitMinutes, Yes
from imagefleet import errors
from imagefleet.pricing import price_file

app = typer.Typer(no_args_is_help=True, help="Deploys workers to where the GPUs are.")
salad = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    epilog="To roll out a change, edit the file and `apply` it again.",
)
app.add_typer(salad, name="salad", short_help="SaladCloud's container groups.")


@salad.callback()
def render(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the requests and the price.")
    ] = False,
    file: File = None,
    replicas: Replicas = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A report of `imagefleet bench engine`; repeatable."),
    ] = None,
    prices_path: Annotated[
        Path | None,
        typer.Option("--price-file", metavar="FILE", help="Your own prices, as YAML."),
    ] = None,
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Do not mask secrets.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the groups, as JSON.")
    ] = False,
) -> None:
    """Manages the container groups of a fleet on SaladCloud, from one fleet file.

    imagefleet deploy salad --dry-run

    imagefleet deploy salad --dry-run --replicas 750 --json

    imagefleet deploy salad apply
    """
    options = (dry_run, file, replicas, bench, prices_path, show_secrets, as_json)
    with console.one_line_errors():
        if context.invoked_subcommand:
            if any(options):
                raise errors.SetupError(
                    "put options after the command: imagefleet deploy salad"
                    f" {context.invoked_subcommand} ..."
                )
            return
        if not dry_run:
            raise errors.SetupError("add --dry-run for a preview, or run `apply`")
        _dry_run(file, replicas, bench, prices_path, show_secrets=show_secrets, as_json=as_json)


def _dry_run(
    file_path: Path | None,
    replicas: int | None,
    bench_paths: list[Path] | None,
    prices_path: Path | None,
    *,
    show_secrets: bool,
    as_json: bool,
) -> None:
    file, folder = salad_options.read_file(file_path)
    table = price_file.read_table(prices_path)
    classes = gpus.find(file.gpus, gpus.built_in(table))
    benches = [inputs.read_bench(path, table) for path in bench_paths or []]
    inputs.refuse_unused(benches, [each.name for each in classes])
    missing: list[str] = []

    def read_secret(source: salad_file.SecretSource) -> SecretStr:
        try:
            return source.read(folder)
        except errors.SetupError as error:
            if show_secrets:
                raise
            missing.append(error.message)
            return SecretStr(groups.MASKED)

    bodies = groups.render(file, classes, read_secret, replicas)
    console.print_json((groups.reveal if show_secrets else groups.mask)(bodies))
    for message in dict.fromkeys(missing):
        console.print_note(f"{message}: `apply` needs it; with it, the groups' revision differs")
    if not as_json:
        source = "; ".join(dict.fromkeys(table.gpus[each.name].source for each in classes))
        total = sum(body["replicas"] for body in bodies)
        salad_price.print_price(total, classes, file.priority, benches, source)


@salad.command()
def apply(
    file: File = None,
    replicas: Replicas = None,
    enough: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of new replicas that must run before old ones are drained."
        ),
    ] = 0.8,
    wait_minutes: WaitMinutes = 60,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes, make none.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Creates the groups, or changes what differs from the file.

    Replicas are changed in place. Any other change restarts workers, so it creates new groups, and
    drains and deletes the old ones once enough of the new replicas run. After a failure, run it
    again.

    imagefleet deploy salad apply

    imagefleet deploy salad apply --replicas 20 --yes
    """
    console.run(_apply(file, replicas, enough, wait_minutes * 60, dry_run=dry_run, yes=yes))


for command in (running.scale, running.status, running.drain, running.delete):
    salad.command()(command)


async def _apply(
    path: Path | None,
    replicas: int | None,
    enough: float,
    wait_seconds: float,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    file, folder = salad_options.read_file(path)
    async with salad_options.connected(file, folder) as fleet:
        known, existing, quota = await asyncio.gather(
            fleet.client.gpu_classes(), fleet.groups(), fleet.client.quota()
        )
        classes = gpus.find(file.gpus, known)
        bodies = groups.render(
            file,
            classes,
            lambda source: source.read(folder),
            replicas,
            existing=[group.name for group in existing],
        )
        plan = deployment.changes(bodies, existing)
        if not plan:
            console.print_note(f"{file.name} is up to date")
            return
        for line in _plan_lines(plan):
            console.print_note(line)
        deployment.refuse_over_quota(plan.more_replicas, quota)
        price = salad_price.replica_price(classes, file.priority)
        console.print_note(_cost(bodies, plan, price))
        if dry_run:
            return
        if plan.more_replicas > 0 or plan.start or plan.old:
            salad_options.confirm("Apply?", yes=yes)
        await fleet.carry_out(plan)
        if plan.old:
            await fleet.replace(plan.old, enough=enough, wait_seconds=wait_seconds)
        console.print_note(
            "done; `imagefleet deploy salad status --watch` shows the replicas start"
        )


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


def _cost(
    bodies: list[dict[str, Any]], plan: deployment.Changes, price: salad_price.PriceRange
) -> str:
    total = price.times(sum(body["replicas"] for body in bodies))
    text = f"cost: {total}, {total.per_day} while all replicas run"
    if plan.old:
        text += f"; plus {sum(group.replicas for group in plan.old):,} old replicas until drained"
    return text

"""`imagefleet scale`: sets the replicas by the queue, a deadline and a budget."""

import contextlib
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cli import console, options
from cli.options import option
from fleet.monitor import prometheus
from fleet.salad import deployment, gpus
from fleet.salad import file as salad_file
from fleet.scale.decision import Goal
from fleet.scale.scaler import Scaler, Speed, Speeds
from fleet.settings import MonitorSettings
from imagefleet.errors import SetupError
from imagefleet.pricing import families, prices
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONDict
from worker.accelerator import Accelerator


@dataclass(frozen=True)
class Running:
    """Options on the speed of a replica, and on how the scaler runs."""

    images_per_second: float | None = option(
        "Of one replica, with the first of the fleet file's `models`; those of other"
        " families count by their operations. Divide it by the images of a job, if those"
        " are several. By default as --prometheus measures it.",
        min=0.0001,
        metavar="NUMBER",
    )
    sample_seconds: float = option(
        "Between samples, which count the cost.", 60, min=1, max=600
    )
    state: Path | None = option(
        "Record of the cost [default: NAME-scale.json].", metavar="FILE"
    )
    dry_run: bool = options.dry_run("each decision in the log")
    once: bool = option("Make one decision, then exit.", default=False)
    until_empty: bool = option(
        "Exit when the queue is empty and no worker runs.", default=False
    )
    yes: options.Yes = False


@options.flat
async def command(
    settings: MonitorSettings,
    *,
    max_dollars: float = option(
        "Total budget, across restarts.", ..., min=0.01, metavar="DOLLARS"
    ),
    deadline: datetime | None = options.moment("When the queue should be empty"),
    dollars_per_hour: float | None = option(
        "Most $/h of the fleet.", min=0.01, metavar="DOLLARS"
    ),
    replicas: int | None = option(
        "At most; by default those of the fleet file.", min=1, metavar="COUNT"
    ),
    running: Running,
    file: salad_file.File = None,
    as_json: options.AsJsonLines = False,
) -> None:
    """Scales a fleet on SaladCloud by its queue, within a budget.

    Samples the queue and the fleet every minute and changes the replicas every 15 minutes, until
    SIGTERM or Ctrl-C: as many as the deadline needs or $/h allows, none for an empty queue, and
    for no more than --max-dollars in total, counted from the workers that SaladCloud reports as
    running. The cost of an hour without it, or without SaladCloud's API, is kept in reserve; after
    that hour SaladCloud itself ends the workers, by scheduled scaling, which is renewed while this
    runs. It asks once before it spends; a service needs --yes.

    imagefleet scale --deadline 2026-12-01T08:00 --max-dollars 200

    imagefleet scale --dollars-per-hour 15 --max-dollars 100 --dry-run --once
    """
    if deadline is None and dollars_per_hour is None:
        raise SetupError("give a goal: --deadline, --dollars-per-hour or both")
    if deadline is not None and deadline.timestamp() <= time.time():
        past = deadline.isoformat(" ", "minutes")
        raise SetupError(f"--deadline {past} is in the past: give a later one")
    fleet_file = salad_file.read_file(file)
    goal = Goal(
        max_dollars=max_dollars,
        max_replicas=replicas or fleet_file.replicas,
        deadline=deadline.timestamp() if deadline else None,
        dollars_per_hour=dollars_per_hour,
        sample_seconds=running.sample_seconds,
        models=[model.name for model in fleet_file.served_models()] or None,
    )
    console.confirm(
        f"Spend up to ${goal.max_dollars:,.2f} on {fleet_file.name}, at most"
        f" {console.counted(goal.max_replicas, 'replica')}?",
        yes=running.yes or running.dry_run,
    )
    logs.configure("auto")
    speed = running.images_per_second
    state = running.state or Path(f"{fleet_file.name}-scale.json")
    # A preview may run beside the scaler itself.
    alone = contextlib.nullcontext() if running.dry_run else console.only_one(state)
    with alone:
        async with (
            console.connected(settings) as client,
            prometheus.connected(settings.prometheus, settings.queried_fleet) as server,
            deployment.connected(fleet_file) as fleet,
        ):
            scaling = Scaler(
                goal,
                fleet,
                client.storage,
                state,
                Speeds(
                    given=Speed(speed, "given") if speed else None,
                    last=_assumed_speed(fleet_file),
                    server=server,
                    models=fleet_file.served_models(),
                ),
                is_dry_run=running.dry_run,
            )
            await _scale(scaling, running, as_json=as_json)


async def _scale(scaling: Scaler, running: Running, *, as_json: bool) -> None:
    """Decides once, or until it is stopped; then says what it leaves running."""
    print_record = _print_record if as_json else lambda _: None
    if running.once:
        print_record(await scaling.step())
        return
    await console.until_stopped(scaling.run(print_record, running.until_empty))
    if scaling.running:
        log.warning(
            f"{scaling.running} workers keep running for an hour at most, then SaladCloud ends"
            " them: run scale again, or `imagefleet deploy apply` to keep them without a limit",
            action="scale_end",
            running=scaling.running,
        )


def _assumed_speed(file: salad_file.FleetFile) -> Speed | None:
    """The speed of the fleet's slowest GPU class on its first model, by public benchmarks."""
    records = [
        prices.ASSUMED_IMAGES_PER_SECOND.get(each.name)
        for each in file.gpu_classes(gpus.built_in())
    ]
    served = file.served_models()
    family = served[0].family if served else families.SD1
    steps = family.steps
    rows = family.rows
    if name := file.environment.get(options.variable("accelerator")):
        steps, rows = Accelerator.of(str(name)).usual
    known = [
        family.images_per_second(record, steps, rows) for record in records if record
    ]
    return Speed(min(known), "assumed") if known else None


def _print_record(record: JSONDict) -> None:
    moment = (
        datetime.fromtimestamp(record["now"]).astimezone().isoformat(timespec="seconds")
    )
    try:
        console.print_json_line({"time": moment, **record})
    except (
        OSError
    ) as error:  # a full disk, a closed pipe: somebody has to watch the budget
        log.warning(
            f"the decision cannot be printed: {error}", action="decision_not_printed"
        )

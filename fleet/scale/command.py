"""`imagefleet scale`: sets the replicas by the queue, a deadline and a budget."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fleet import console, options
from fleet.monitor import prometheus
from fleet.monitor.settings import MonitorSettings
from fleet.salad import file as salad_file
from fleet.salad import gpus
from fleet.salad import options as salad_options
from fleet.salad.options import File, Yes
from fleet.scale import scaler
from fleet.scale.decision import Goal
from imagefleet import errors
from imagefleet.pricing import prices
from imagefleet.telemetry import logs

log = logging.getLogger(__name__)


@options.from_settings(MonitorSettings)
@console.synchronous
async def command(
    settings: MonitorSettings,
    max_dollars: Annotated[
        float, typer.Option(min=0.01, metavar="DOLLARS", help="Total budget, across restarts.")
    ],
    file: File = None,
    deadline: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S%z"],
            help="When the queue should be empty, in local time.",
        ),
    ] = None,
    dollars_per_hour: Annotated[
        float | None, typer.Option(min=0.01, metavar="DOLLARS", help="Most $/h of the fleet.")
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, metavar="COUNT", help="By default those of the fleet file."),
    ] = None,
    images_per_second: Annotated[
        float | None,
        typer.Option(min=0.0001, metavar="NUMBER", help="Of one replica; measured by default."),
    ] = None,
    images_per_job: Annotated[int, typer.Option(min=1, max=64, metavar="COUNT")] = 1,
    every_minutes: Annotated[
        float, typer.Option(min=1, max=240, help="Between changes; nodes take minutes to start.")
    ] = 15,
    sample_seconds: Annotated[
        float, typer.Option(min=1, max=600, help="Between samples, which count the cost.")
    ] = 60,
    look_seconds: Annotated[float | None, typer.Option(min=1, max=600, hidden=True)] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record of the cost [default: NAME-scale.json]."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Log decisions without acting on them.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Make one decision, then exit.")] = False,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Exit when the queue is empty and no worker runs.")
    ] = False,
    yes: Yes = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each decision as JSON.")] = False,
) -> None:
    """Scales a fleet on SaladCloud by its queue, within a budget.

    Samples the queue and the fleet every minute and changes the replicas every 15 minutes, until
    SIGTERM or Ctrl-C: as many as the deadline needs or $/h allows, none for an empty queue, and
    never for more than --max-dollars in total, counted from the workers that SaladCloud reports as
    running. Keep it running: without it, workers continue and are billed. It asks once before it
    spends; a service needs --yes.

    imagefleet scale --deadline 2026-12-01T08:00 --max-dollars 200

    imagefleet scale --dollars-per-hour 15 --max-dollars 100 --dry-run --once
    """
    if deadline is None and dollars_per_hour is None:
        raise errors.SetupError("give a goal: --deadline, --dollars-per-hour or both")
    if deadline and deadline.timestamp() <= time.time():
        past = deadline.astimezone().isoformat(" ", "minutes")
        raise errors.SetupError(f"--deadline {past} is in the past: give a later one")
    if look_seconds is not None:
        console.print_warning("--look-seconds is deprecated; use --sample-seconds")
    fleet_file, folder = salad_options.read_file(file)
    goal = Goal(
        max_dollars=max_dollars,
        max_replicas=max_replicas or fleet_file.replicas,
        deadline=deadline.timestamp() if deadline else None,
        dollars_per_hour=dollars_per_hour,
        every_seconds=every_minutes * 60,
        sample_seconds=look_seconds or sample_seconds,
    )
    if not dry_run:
        most = console.counted(goal.max_replicas, "replica")
        salad_options.confirm(
            f"Spend up to ${max_dollars:,.2f} on {fleet_file.name}, at most {most}?", yes=yes
        )
    given = None
    if images_per_second is not None:
        given = scaler.Speed(images_per_second / images_per_job, "given")
    logs.configure("auto")
    async with (
        console.connected(settings) as client,
        prometheus.connected_if(settings.prometheus, settings.queried_fleet) as server,
        salad_options.connected(fleet_file, folder) as fleet,
    ):
        scaling = scaler.Scaler(
            goal,
            fleet,
            client.storage,
            ledger or Path(f"{fleet_file.name}-scale.json"),
            scaler.Speeds(
                given=given, assumed=_assumed_speed(fleet_file, images_per_job), server=server
            ),
            is_dry_run=dry_run,
        )
        print_record = _print_line if as_json else lambda _: None
        if once:
            print_record(await scaling.step())
        else:
            await _run(scaling, print_record, until_empty=until_empty)


async def _run(
    scaling: scaler.Scaler, print_record: Callable[[dict[str, Any]], None], *, until_empty: bool
) -> None:
    """Runs until SIGTERM, Ctrl-C or, with *until_empty*, the end of all work."""

    def on_decision(record: dict[str, Any]) -> None:
        print_record(record)
        if until_empty and scaling.is_finished:
            log.info("the queue is empty and no worker runs", extra={"action": "scale_done"})
            running.cancel()

    running = asyncio.create_task(scaling.run(on_decision), name="scale")
    await console.until_stopped(running)
    if scaling.running:
        log.warning(
            "%d workers keep running and nothing limits their cost: run scale again, or"
            " `imagefleet deploy salad drain`",
            scaling.running,
            extra={"action": "scale_end", "running": scaling.running},
        )


def _assumed_speed(file: salad_file.FleetFile, images_per_job: int) -> scaler.Speed | None:
    """The speed of the fleet's slowest GPU class by public benchmarks."""
    names = [each.name for each in gpus.find(file.gpus, gpus.built_in())]
    known = [speed for name in names if (speed := prices.ASSUMED_IMAGES_PER_SECOND.get(name))]
    return scaler.Speed(min(known) / images_per_job, "assumed") if known else None


def _print_line(record: dict[str, Any]) -> None:
    moment = datetime.fromtimestamp(record["now"]).astimezone().isoformat(timespec="seconds")
    sys.stdout.write(json.dumps({"time": moment, **record}) + "\n")
    sys.stdout.flush()

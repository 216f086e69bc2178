"""`imagefleet worker`: one process per GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import typer

from fleet import console, options
from fleet.options import option
from fleet.worker import live
from imagefleet.telemetry import logs
from worker.models import checkpoints
from worker.node import salad
from worker.progress import WorkerReport, duration
from worker.settings import MachineSettings, WorkerSettings, require_libraries

if TYPE_CHECKING:
    from worker.gpus.child import Member


@options.from_settings(MachineSettings)
def command(
    settings: MachineSettings,
    fail_on_failed: bool = option(
        "Exit with code 4 if a job of this worker went to the poison queue; not on SaladCloud.",
        default=False,
    ),
) -> None:
    """Generates images from the queue's jobs: one worker per GPU.

    With --gpus all or --gpus 0,2 one command runs several, starts those that crash again, and
    serves the metrics of all on its port.

    Runs until SIGTERM or Ctrl-C, or with --until-empty until the queue is empty. When stopped it
    finishes the images in flight and hands the other jobs back. With --until-empty, exit code 0
    says that the queue is empty, 143 that SIGTERM came first.

    A terminal shows its progress in a line at the bottom, a log in a line a minute.

    imagefleet worker --model ./model --until-empty

    imagefleet worker --model ./model.safetensors --lora-directory ./loras --port 9100

    imagefleet worker --model ./model --gpus all
    """
    require_libraries()
    # They need libraries of the extra `worker`.
    from worker.gpus import child, choice, parent

    if member := child.Member.from_environment():
        logs.name_device(member.assignment.gpu)
        logs.configure(settings.log_format)
        report = _run(member.settings(settings), member)
    else:
        gpus = choice.choose(settings) if settings.gpus is not None else []
        if len(gpus) == 1:
            os.environ.update(gpus[0].environment(1))  # the only one of this process
        if len(gpus) > 1 or not _has_terminal(settings):
            logs.configure(settings.log_format)
        if not _is_on_salad():  # there a worker waits for the operator instead
            checkpoints.check(settings)
        if len(gpus) > 1:
            # Each is this same command, and finds which GPU is its own in its environment.
            again = [sys.executable, *sys.orig_argv[1:]]
            raise typer.Exit(console.run(parent.run_workers(settings, gpus, again)))
        report = _run(settings)
    if report.stopped_by is not None:
        # With 0 a Kubernetes Job would not replace a worker that was evicted.
        was_terminated = report.stopped_by is signal.SIGTERM
        raise typer.Exit(console.EXIT_TERMINATED if was_terminated else console.EXIT_INTERRUPTED)
    if fail_on_failed and report.failed_jobs and not _is_on_salad():
        raise typer.Exit(console.EXIT_JOBS_FAILED)


def _has_terminal(settings: WorkerSettings) -> bool:
    # rich alone takes a pipe for a terminal where FORCE_COLOR is set.
    return (
        settings.log_format != "json"
        and sys.stderr.isatty()
        and console.stderr.is_terminal
        and not console.stderr.is_dumb_terminal
    )


def _is_on_salad() -> bool:
    """There, an exit code other than 0 says that the node is broken."""
    return salad.find_metadata() is not None


def _run(settings: WorkerSettings, member: Member | None = None) -> WorkerReport:
    from worker import process  # needs the extra `worker`

    if member or not _has_terminal(settings):
        return console.run(process.run_worker(settings, member=member))
    logs.configure("text", live.LogHandler(console.stderr))
    # An error is printed when the live line is gone.
    with console.one_line_errors(), live.showing(console.stderr) as show:
        report = asyncio.run(process.run_worker(settings, on_progress=show))
    _show(report)
    return report


def _show(report: WorkerReport) -> None:
    seconds, start_up = duration(report.seconds), duration(report.start_up_seconds)
    per_dollar = report.images_per_dollar
    facts = {
        "images": f"{report.images:,}",
        "failed jobs": f"{report.failed_jobs:,}",
        "time": f"{seconds}, of which {start_up} to start up",
        "images/s": f"{report.images_per_second:.2f}",
        "engine idle": f"{console.percent(report.engine_idle_fraction)} of the time",
        "images per dollar": (
            "unknown without --price-per-hour" if per_dollar is None else f"{per_dollar:,.0f}"
        ),
    }
    console.print_facts(facts, console.stderr)

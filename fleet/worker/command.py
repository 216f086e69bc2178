"""`imagefleet worker`: one process per GPU, and its live line on a terminal."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text
from typer import Exit

from cli import console, options
from cli.options import option
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import duration
from worker.models import checkpoints
from worker.node import salad
from worker.progress import Progress, WorkerReport
from worker.settings import MachineSettings, WorkerSettings, require_libraries


@options.flat
def command(
    settings: MachineSettings,
    fail_on_failed: bool = option(
        "Exit with code 4 if a job of this worker went to the poison queue; not on SaladCloud.",
        default=False,
    ),
) -> None:
    """Generates images from the queue's jobs: one worker per GPU.

    With --gpus all or --gpus 0,2 one command runs several, and starts those that crash again. Each
    serves its metrics on a port of its own, those after --port.

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
    from worker.gpus import choice, parent

    if assigned := parent.assigned(settings):
        gpu, own_settings = assigned
        logs.name_device(gpu)
        logs.configure(settings.log_format)
        report = _run(own_settings, gpu)
    else:
        gpus = choice.choose(settings) if settings.gpus is not None else []
        if len(gpus) == 1:
            os.environ.update(gpus[0].environment(1))  # the only one of this process
        if len(gpus) > 1 or not _has_terminal(settings):
            logs.configure(settings.log_format)
        if (
            salad.find_metadata() is None
        ):  # on SaladCloud a worker waits for the operator instead
            checkpoints.check(settings)
        if len(gpus) > 1:
            # Each is this same command, and finds which GPU is its own in its environment.
            again = [sys.executable, *sys.orig_argv[1:]]
            raise Exit(console.run(parent.run_workers(settings, gpus, again)))
        report = _run(settings)
    if report.stopped_by is not None:
        # With 0 a Kubernetes Job would not replace a worker that was evicted.
        was_terminated = report.stopped_by is signal.SIGTERM
        raise Exit(
            console.EXIT_TERMINATED if was_terminated else console.EXIT_INTERRUPTED
        )
    # On SaladCloud, an exit code other than 0 says that the node is broken.
    if fail_on_failed and report.failed_jobs and salad.find_metadata() is None:
        raise Exit(console.EXIT_JOBS_FAILED)


def _has_terminal(settings: WorkerSettings) -> bool:
    # rich alone takes a pipe for a terminal where FORCE_COLOR is set.
    return (
        settings.log_format != "json"
        and sys.stderr.isatty()
        and console.stderr.is_terminal
        and not console.stderr.is_dumb_terminal
    )


def _run(settings: WorkerSettings, gpu: str | None = None) -> WorkerReport:
    from worker import process  # needs the extra `worker`

    if gpu is not None or not _has_terminal(settings):
        return console.run(process.run_worker(settings, gpu=gpu))
    logs.configure("text", LogHandler())
    # An error is printed when the live line is gone.
    with console.one_line_errors(), showing() as show:
        report = asyncio.run(process.run_worker(settings, on_progress=show))
    per_dollar = report.images_per_dollar
    facts = {
        "images": report.images,
        "failed jobs": report.failed_jobs,
        "time": f"{duration(report.seconds)}, of which {duration(report.start_up_seconds)} to start"
        " up",
        "images/s": f"{report.images_per_second:.2f}",
        "engine idle": f"{console.percent(report.engine_idle_fraction)} of the time",
        "images per dollar": (
            "unknown without --price-per-hour"
            if per_dollar is None
            else f"{per_dollar:,.0f}"
        ),
    }
    console.print_facts(facts, console.stderr)
    return report


_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class LogHandler(logging.Handler):
    """Prints each record above the live line, if there is one; long lines are not wrapped."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelname, "")
            console.stderr.print(Text(self.format(record), style), soft_wrap=True)
        except Exception:  # noqa: BLE001 - as the handlers of the standard library do
            self.handleError(record)


@contextlib.contextmanager
def showing() -> Iterator[Callable[[Progress], None]]:
    """Shows what the yielded function is given, until the block ends; long lines are wrapped."""
    spinner = Spinner("line")
    is_terminal = sys.stdout.isatty()  # and not a file that stdout is sent to
    with Live(
        console=console.stderr, transient=True, redirect_stdout=is_terminal
    ) as live:

        def show(progress: Progress) -> None:
            state = [] if progress.phase == "generating" else [progress.state]
            line = Table.grid(padding=(0, 1))
            line.add_row(spinner, Text(" | ".join([*state, *progress.figures]), "bold"))
            live.update(line)

        yield show

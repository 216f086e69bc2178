"""`imagefleet`, the operator's console. Each command imports its rooms only when it runs."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import typer

from fleet import console, demo, failed, health, load, options, prompt, worker
from fleet.bench import command as bench
from fleet.keys import command as keys
from fleet.monitor import exporter, status, top
from fleet.plan import command as plan
from fleet.report import command as report
from fleet.salad import command as deploy
from fleet.scale import command as scale

app = typer.Typer(
    name="imagefleet",
    # Plain help: typer's boxes leave the text of a long setting's name no room.
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="""Turns queues of prompt jobs into Stable Diffusion images, at the lowest cost an image.

A queue holds the jobs, any number of workers (one for each GPU) turn them into images, and a job
that cannot succeed waits, with its reason, in the queue's poison queue.""",
    epilog="""\b
A first look, without an account or a GPU:
  imagefleet demo

\b
On one machine, with everything in the folder imagefleet-data:
  imagefleet load jobs.jsonl
  imagefleet worker --model ./model --until-empty
  imagefleet status
  imagefleet failed list

Settings are flags or variables, as you like: --queue is IMAGEFLEET_QUEUE.

Exit codes: 0 done, 1 unexpected, 2 something for you to set right, 3 this machine cannot do its
work, 130 interrupted.""",
)

app.command("demo")(demo.command)
app.command("worker")(worker.command)
app.command("load")(load.command)
app.command("status")(status.command)
app.command("top")(top.command)
app.command("exporter")(exporter.command)
app.add_typer(failed.app, name="failed", short_help="Lists, replays and discards failed jobs.")
app.add_typer(keys.app, name="keys", short_help="Makes, checks and revokes tokens for workers.")
app.command("plan")(plan.command)
app.command("report")(report.command)
app.add_typer(deploy.app, name="deploy", short_help="Deploys workers to where the GPUs are.")
app.command("scale")(scale.command)
app.command("prompt")(prompt.command)
app.add_typer(bench.app, name="bench", short_help="Measures how fast this machine is.")


@app.command(
    "health",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def health_command(context: typer.Context) -> None:
    """Asks the worker of this machine how it is, for probes."""
    raise typer.Exit(health.main(context.args))  # where `fleet.entry` was not the way in


@app.command()
def version() -> None:
    """Prints the versions that a report of a fault should name."""
    for distribution in ("imagefleet", "torch", "diffusers"):
        try:
            installed = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        console.stdout.print(f"{distribution} {installed}", highlight=False)
    console.stdout.print(f"python {platform.python_version()}", highlight=False)


@app.command("settings", hidden=True)
def settings_table() -> None:
    """Prints the README's table of settings."""
    sys.stdout.write(options.markdown_table())


def main() -> None:
    """The console script: ends the process with one of the exit codes of `fleet.console`."""
    try:
        # Not standalone: typer would draw a wrong option as a box of several lines.
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        console.print_error(error.format_message())
        code = console.EXIT_OPERATOR_MUST_ACT
    except typer.Abort:
        code = console.EXIT_INTERRUPTED
    console.leave(code)


if __name__ == "__main__":
    main()

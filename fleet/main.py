"""`imagefleet`, the operator's console. Each command imports what it needs only when it runs."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from evaluation.bench import command as bench
from evaluation.gate import command as gate
from evaluation.score import command as score
from fleet import console, demo, health, load, options, prompt
from fleet.broker import command as broker
from fleet.campaigns import cancel, purge, table
from fleet.campaigns import job as job_command
from fleet.export import command as export
from fleet.failed import command as failed
from fleet.files import embedding, kernels, lora, model
from fleet.gallery import command as gallery
from fleet.keys import command as keys
from fleet.monitor import command as monitor
from fleet.networks import command as networks
from fleet.plan import command as plan
from fleet.redo import command as redo
from fleet.report import command as report
from fleet.results import command as results
from fleet.salad import command as deploy
from fleet.scale import command as scale
from fleet.sweep import command as sweep
from fleet.texts import command as texts
from fleet.verify import command as verify
from fleet.webhooks import command as webhooks
from fleet.worker import command as worker
from imagefleet.telemetry import logs

#: Commands whose stderr is a log, which a program may read.
_SERVICES = ("worker", "exporter", "broker", "webhooks")

#: Types of options in typer's help and in that of the settings.
_METAVARS = {
    "path": "PATH",
    "str": "TEXT",
    "int( range)?": "INTEGER",
    "float( range)?": "NUMBER",
}

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

#: `Invalid value for '--jobs': Input should be ...`, which settings report without these words.
_INVALID_VALUE = re.compile(r"^Invalid value for '([^']+)': (?:Input |Value error, )?")


class Command(TyperCommand):
    """A command whose help has its flags under the subjects of the settings."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        subjects: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if row := each.get_help_record(ctx):
                usual = "Arguments" if each.param_type_name == "argument" else "Options"
                subject = getattr(each, "rich_help_panel", None) or usual
                subjects.setdefault(subject, []).append(_as_of_a_setting(*row))
        for subject, rows in subjects.items():
            with formatter.section(subject):
                formatter.write_dl(rows)


def _as_of_a_setting(name: str, text: str) -> tuple[str, str]:
    """A row of typer's help with types and bounds as people write them."""
    # An argument's name is its metavar; an option's type follows its name.
    name = re.sub(r" <(.*)>", r" \1" if name.startswith("-") else "", name)
    for theirs, ours in _METAVARS.items():
        name = re.sub(rf" {theirs}$", f" {ours}", name)
    text = re.sub(r"([\d.]+)<=x<=([\d.]+)(?=[;\]])", r"\1 to \2", text)
    return name, re.sub(r"x>=([\d.]+)(?=[;\]])", r"at least \1", text)


class Group(TyperGroup):
    """A group of commands whose help, without a command, is no error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        help_only = self.no_args_is_help and not ctx.resilient_parsing
        return super().parse_args(ctx, args or (["--help"] if help_only else []))


app = typer.Typer(
    name="imagefleet",
    # Plain help: typer's boxes leave too little width for long names of settings.
    rich_markup_mode=None,
    no_args_is_help=True,
    # Help is as wide as the terminal, up to a width that is still easy to read.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140},
    pretty_exceptions_enable=False,
    help="""Turns queues of prompt jobs into Stable Diffusion images at the lowest cost per image.

A job queue feeds any number of workers, one per GPU. Jobs that cannot succeed go to the poison
queue, each with its error.""",
    epilog="""\b
A first look, without an account or a GPU:
  imagefleet demo

\b
On one machine, with everything in the folder imagefleet-data:
  imagefleet load jobs.jsonl
  imagefleet worker --model ./model --until-empty
  imagefleet status
  imagefleet failed list

Every setting is a flag and a variable: --queue is IMAGEFLEET_QUEUE.

Exit codes: 0 done, 1 unexpected error, 2 invalid input or setup, 3 broken node (replace it),
4 jobs failed (worker --fail-on-failed) or images are wrong or missing (verify, gate, redo,
results, export), 130 interrupted, 143 terminated (worker --until-empty).""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print_plain(f"imagefleet {metadata.version('imagefleet')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The options of `imagefleet` itself."""


app.command("demo")(demo.command)
app.command("worker")(worker.command)
app.command("load")(load.command)
app.command("sweep")(sweep.command)
app.command("campaigns")(table.command)
app.command("job")(job_command.command)
app.command("cancel")(cancel.command)
app.command("purge")(purge.command)
app.command("status")(monitor.status_command)
app.command("top")(monitor.top_command)
app.command("exporter")(monitor.exporter_command)
app.add_typer(
    failed.app, name="failed", short_help="Lists, exports, replays, discards failed jobs."
)
app.add_typer(keys.app, name="keys", short_help="Creates, checks and revokes SAS tokens.")
app.command("broker")(broker.command)
app.command("webhooks")(webhooks.command)
app.command("plan")(plan.command)
app.command("results")(results.command)
app.command("export")(export.command)
app.command("report")(report.command)
app.command("score")(score.command)
app.command("gallery")(gallery.command)
app.command("verify")(verify.command)
app.command("gate")(gate.command)
app.command("redo")(redo.command)
app.add_typer(deploy.app, name="deploy", short_help="Deploys workers to GPU clouds.")
app.command("scale")(scale.command)
app.command("prompt")(prompt.command)
app.add_typer(model.app, name="model", short_help="Stores and lists checkpoints.")
app.add_typer(lora.app, name="lora", short_help="Stores and lists LoRAs.")
app.add_typer(embedding.app, name="embedding", short_help="Stores and lists embeddings.")
app.add_typer(networks.upscaler, name="upscaler", short_help="Stores and lists upscalers.")
app.add_typer(networks.controlnet, name="controlnet", short_help="Stores and lists ControlNets.")
app.add_typer(texts.app, name="text", short_help="Makes, stores and lists text states.")
app.add_typer(kernels.app, name="kernels", short_help="Builds, stores and lists compiled kernels.")
app.add_typer(bench.app, name="bench", short_help="Measures this machine's speed.")


@app.command(
    "health",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def health_command(context: typer.Context) -> None:
    """Probes the worker on this machine: started, live or ready."""
    raise typer.Exit(health.main(context.args))  # `python -m fleet.main`; see fleet/entry.py


@app.command()
def version(as_json: options.AsJson = False) -> None:
    """Prints the versions to name in a bug report."""
    versions: dict[str, str | None] = {}
    for distribution in ("imagefleet", "torch", "diffusers"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[distribution] = None
    versions["python"] = platform.python_version()
    if as_json:
        console.print_json(versions)
        return
    for name, installed in versions.items():
        console.print_plain(f"{name} {installed or 'not installed'}")


def _use_help_classes(group: typer.Typer) -> None:
    group.info.cls = Group
    for command in group.registered_commands:
        command.cls = Command
    for each in group.registered_groups:
        if each.typer_instance:
            _use_help_classes(each.typer_instance)


_use_help_classes(app)


def _log_format(arguments: Sequence[str], variables: Mapping[str, str]) -> logs.LogFormat:
    """The log format of a command line that nothing has checked yet; an invalid one is `auto`."""
    name = "--log-format"
    given = variables.get("IMAGEFLEET_LOG_FORMAT", "")
    for flag, following in itertools.pairwise([*arguments, ""]):
        if flag == name:
            given = following
        elif flag.startswith(f"{name}="):
            given = flag.partition("=")[2]
    formats: tuple[logs.LogFormat, ...] = get_args(logs.LogFormat)
    return next((each for each in formats if each == given), "auto")


def main() -> None:
    """The console script; exits with one of the codes of `fleet.console`."""
    if sys.argv[1:2] and sys.argv[1] in _SERVICES:
        # Wrong settings, too, are reported in the log.
        logs.configure(_log_format(sys.argv[2:], os.environ))
    try:
        # Not standalone: typer would print a wrong option as a box of several lines.
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        code = console.EXIT_OPERATOR_MUST_ACT
        console.report_error(_INVALID_VALUE.sub(r"\1: ", error.format_message()), code)
    except typer.Abort:
        code = console.EXIT_INTERRUPTED
    except OSError as error:
        code = console.EXIT_UNEXPECTED
        if error.errno in _DISK_FULL:
            place = error.filename or "the output"
            console.report_error(f"the disk is full: cannot write {place}; free some space", code)
        else:
            console.report_bug(error)
    except Exception as error:  # noqa: BLE001 - a bug, with its traceback
        code = console.EXIT_UNEXPECTED
        console.report_bug(error)
    console.leave(code)


if __name__ == "__main__":
    main()

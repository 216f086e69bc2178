"""`imagefleet`, the operator's console. Each command imports what it needs only when it runs."""

import contextlib
import importlib
import os
import platform
import re
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any, Literal, get_args

import typer
from typer import Abort, BadParameter, Context, Exit, Option, Typer, TyperException
from typer.core import TyperCommand, TyperGroup

from cli import console
from fleet import health
from imagefleet.errors import DISK_FULL
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import LogFormat

#: The commands and groups of commands, with their lines in the help.
COMMANDS = {
    "demo": "Generates images on this machine: no account, no GPU.",
    "worker": "Generates images from the queue's jobs: one worker per GPU.",
    "serve": "Serves AUTOMATIC1111's and OpenAI's APIs in front of the storage.",
    "load": "Fills the job queue from a template or a file of jobs.",
    "import": "Makes jobs that draw pictures of other programs again.",
    "sweep": "Draws captions with all combinations of settings.",
    "cancel": "Cancels the queued jobs of a campaign.",
    "status": "Shows what the fleet is doing: queues, campaigns, speed, one job.",
    "exporter": "Exports queue depths.",
    "broker": "Issues short-lived SAS tokens to workers on SaladCloud.",
    "webhooks": "Sends webhooks when campaigns and jobs end.",
    "plan": "Plans a batch: hours, dollars and images per dollar.",
    "results": "Shows a campaign's images, and jobs that ended without one.",
    "export": "Writes a campaign's images as a verified data set, in shards.",
    "report": "Writes a campaign's report: throughput, cost, failures.",
    "score": "Scores a campaign's images: FID, KID, CLIP score, CMMD.",
    "gallery": "Shows a campaign's images in the browser, as they arrive.",
    "verify": "Names workers that draw wrong, or checks an export offline.",
    "gate": "Compares images of the same jobs that were drawn in two ways.",
    "redo": "Has images or dropped jobs drawn again, and replaces them.",
    "scale": "Scales a fleet on SaladCloud by its queue, within a budget.",
    "prompt": "Shows a prompt's tokens, weights and LoRAs.",
    "failed": "Counts the failed jobs by error and lists them, or shows one.",
    "replay": "Puts failed jobs back into the job queue.",
    "discard": "Deletes failed jobs for good.",
    "keys": "Creates and revokes SAS tokens.",
    "deploy": "Deploys workers to SaladCloud.",
    "files": "Adds, lists, removes and makes models, LoRAs and other files.",
    "bench": "Measures this machine's speed.",
}

#: Where those are that are not the `command` of `fleet.NAME.command`, as `module:attribute`.
_ELSEWHERE = {
    "load": "fleet.load:command",
    "import": "fleet.importing:command",
    "cancel": "fleet.campaigns.cancel:command",
    "status": "fleet.monitor.command:command",
    "exporter": "fleet.monitor.exporter:command",
    "sweep": "evaluation.sweep.command:command",
    "score": "evaluation.score.command:command",
    "gate": "evaluation.gate.command:command",
    "prompt": "fleet.prompt:command",
    "serve": "fleet.serve:command",
    "replay": "fleet.failed.command:replay_command",
    "discard": "fleet.failed.command:discard_command",
    "keys": "fleet.keys.command:app",
    "broker": "fleet.keys.broker:command",
    "deploy": "fleet.salad.command:app",
    "files": "fleet.files.command:app",
    "bench": "evaluation.bench.command:command",
}

#: How help texts are read: with backticks, but without rich's tags, whose brackets stand in them.
_MARKUP: Literal["markdown"] = "markdown"

#: Commands whose stderr is a log, which a program may read.
_SERVICES = ("worker", "serve", "exporter", "broker", "webhooks")

#: `Invalid value for '--jobs': Input should be ...`, which settings report without these words.
_INVALID_VALUE = re.compile(r"^Invalid value for '([^']+)': (?:Input |Value error, )?")


class Group(TyperGroup):
    """A group of commands whose help, without a command, is no error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        help_only = self.no_args_is_help and not ctx.resilient_parsing
        return super().parse_args(ctx, args or (["--help"] if help_only else []))


def find(name: str) -> Any:
    """The function or the typer application of a command; imports it, and all settings models."""
    importlib.import_module("fleet.settings")
    module, _, attribute = _ELSEWHERE.get(
        name, f"fleet.{name}.command:command"
    ).partition(":")
    return getattr(importlib.import_module(module), attribute)


class LazyCommands(UserDict[str, Any]):
    """Click commands by name; those of `COMMANDS` are None until they are looked up."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            found = find(name)
            app = Typer(rich_markup_mode=_MARKUP, add_completion=False)
            app.callback()(
                lambda: None
            )  # makes it a group, however few commands it has
            if isinstance(found, Typer):
                app.add_typer(found, name=name, short_help=COMMANDS[name], cls=Group)
            else:
                app.command(name)(found)
            self.data[name] = typer.main.get_group(app).commands[name]
        return self.data[name]


class Console(Group):
    """The group of all commands, whose help imports none of them."""

    def __init__(self, **terms: Any) -> None:
        super().__init__(**terms)
        self.commands = LazyCommands({**dict.fromkeys(COMMANDS), **self.commands})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = self.commands
        self.commands = {
            name: TyperCommand(name, short_help=text) for name, text in COMMANDS.items()
        }
        self.commands["health"] = commands["health"]
        super().format_help(ctx, formatter)
        self.commands = commands


app = Typer(
    name="imagefleet",
    cls=Console,
    rich_markup_mode=_MARKUP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Turns queues of prompt jobs into Stable Diffusion images at the lowest cost per image.

A job queue feeds any number of workers, one per GPU. Jobs that cannot succeed go to the poison
queue, each with its error.""",
    epilog="""A first look, without an account or a GPU:

imagefleet demo

On one machine, with everything in the folder imagefleet-data:

imagefleet load jobs.jsonl

imagefleet worker --model ./model --until-empty

imagefleet status

imagefleet failed

Every setting is a flag and a variable: --queue is IMAGEFLEET_QUEUE.

Exit codes: 0 done, 1 unexpected error, 2 invalid input or setup, 3 broken node (replace it),
4 jobs failed (worker --fail-on-failed) or images are wrong or missing (verify, gate, redo,
results, export), 130 interrupted, 143 terminated (worker --until-empty).""",
)


@app.callback(invoke_without_command=True)
def root(
    context: Context,
    version: Annotated[
        bool,
        Option("--version", help="Print the versions to name in a bug report."),
    ] = False,
) -> None:
    """The options of `imagefleet` itself."""
    if version:
        for distribution in ("imagefleet", "torch", "diffusers"):
            installed = "not installed"
            with contextlib.suppress(metadata.PackageNotFoundError):
                installed = metadata.version(distribution)
            console.print_plain(f"{distribution} {installed}")
        console.print_plain(f"python {platform.python_version()}")
        raise Exit
    if context.invoked_subcommand is None:
        raise BadParameter("give a command; `imagefleet --help` lists them")


@app.command(
    "health",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def health_command(context: Context) -> None:
    """Probes the worker on this machine: started, live or ready."""
    raise Exit(health.main(context.args))  # `python -m fleet.main`; see fleet/entry.py


def _log_format(arguments: Sequence[str], variables: Mapping[str, str]) -> LogFormat:
    """The log format of a command line that nothing has checked yet; an invalid one is `auto`."""
    flags = re.findall(r"--log-format[= ](\w+)", " ".join(arguments))
    given = flags[-1] if flags else variables.get("IMAGEFLEET_LOG_FORMAT")
    return next((each for each in get_args(LogFormat) if each == given), "auto")


def main() -> None:
    """The console script; exits with one of the codes of `cli.console`."""
    if sys.argv[1:2] and sys.argv[1] in _SERVICES:
        # Wrong settings, too, are reported in the log.
        logs.configure(_log_format(sys.argv[2:], os.environ))
    code = console.EXIT_UNEXPECTED
    try:
        # Not standalone: typer would print a wrong option as a box of several lines.
        code = app(standalone_mode=False)
    except TyperException as error:
        code = console.EXIT_OPERATOR_MUST_ACT
        console.report_error(_INVALID_VALUE.sub(r"\1: ", error.format_message()), code)
    except Abort:
        code = console.EXIT_INTERRUPTED
    except OSError as error:
        if error.errno in DISK_FULL:
            place = error.filename or "the output"
            console.report_error(
                f"the disk is full: cannot write {place}; free some space", code
            )
        else:
            console.report_bug(error)
    except Exception as error:  # noqa: BLE001 - a bug, with its traceback
        console.report_bug(error)
    console.leave(code)


if __name__ == "__main__":
    main()

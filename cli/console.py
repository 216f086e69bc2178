"""Output of all commands: exit codes, one-line errors, JSON, plain output and the stop signals."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import math
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from filelock import FileLock, Timeout
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text
from typer import Exit

from cli import files
from imagefleet import redaction
from imagefleet.concurrency import Result, Work
from imagefleet.errors import FleetError, NodeError, SetupError
from imagefleet.telemetry import logs
from imagefleet.telemetry.logs import log
from imagefleet.validation import JSONObject

if TYPE_CHECKING:
    from imagefleet import aio
    from imagefleet.storage.settings import StorageSettings


EXIT_DONE = 0

#: A bug, which also prints its traceback, or a fault that outlived its retries.
EXIT_UNEXPECTED = 1

#: A setting, an argument, a credential or a resource is wrong: trying again changes nothing.
EXIT_OPERATOR_MUST_ACT = 2

#: This machine cannot do its work: a supervisor should replace it, not restart it.
EXIT_REPLACE_THIS_NODE = 3

#: Lines of a table or of a list: about a screen.
SCREEN_LINES = 20

#: The exit code of --fail-on-failed if all is done, but jobs went to the poison queue.
EXIT_JOBS_FAILED = 4

#: Done, but some images differ from what others drew (`verify`, `gate`), or could not be replaced
#: (`redo`), or are missing (`results --download`, `export`).
EXIT_IMAGES_WRONG = 4

#: A shell's exit code of a program that Ctrl-C ended (128 + SIGINT).
EXIT_INTERRUPTED = 130

#: The same for SIGTERM: a worker that should have emptied the queue.
EXIT_TERMINATED = 143

#: The `action` in the log of an error that ends the process, by its exit code.
_ACTIONS = {
    EXIT_UNEXPECTED: logs.UNEXPECTED_ACTION,
    EXIT_OPERATOR_MUST_ACT: "setup_error",
    EXIT_REPLACE_THIS_NODE: "node_error",
}

#: `worker.gpu_thread.THREAD_NAME`; the console imports the worker only to run it.
ENGINE_THREAD = "engine"

#: Names and what is told of each.
Facts = Mapping[str, object]

#: What is said on the way must not end the work: the disk of a log may be full.
_LOSES_NOTES = contextlib.suppress(OSError)

if isinstance(sys.stdout, io.TextIOWrapper):
    # As Python has it for stderr: a locale without a letter of a prompt must not end a command.
    sys.stdout.reconfigure(errors="backslashreplace")

#: Whether standard output can hold any JSON as it is; else it is written in ASCII.
_IS_UNICODE = (sys.stdout.encoding or "").lower().startswith("utf")

stdout = Console()
stderr = Console(stderr=True)


def run(coroutine: Work[Result]) -> Result:
    """Runs a command's coroutine; errors end the command as in `one_line_errors`."""
    with one_line_errors():
        return asyncio.run(coroutine)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns a FleetError into one line on stderr and an exit code; bugs keep their traceback."""
    try:
        yield
    except FleetError as error:
        code = EXIT_UNEXPECTED
        if isinstance(error, SetupError):
            code = EXIT_OPERATOR_MUST_ACT
        elif isinstance(error, NodeError):
            code = EXIT_REPLACE_THIS_NODE
        report_error(error.message, code)
        raise Exit(code) from None
    except KeyboardInterrupt:
        raise Exit(EXIT_INTERRUPTED) from None


@contextlib.asynccontextmanager
async def connected(settings: StorageSettings) -> AsyncIterator[aio.Fleet]:
    """The client of the settings' storage; raises SetupError if it or its queue cannot be used."""
    from imagefleet import aio, signing
    from imagefleet.storage.open import open_storage
    from imagefleet.storage.settings import SignerSettings

    keys = settings.keys() if isinstance(settings, SignerSettings) else signing.NO_KEYS
    async with aio.Fleet(open_storage(settings), keys) as fleet:
        await fleet.storage.check()
        yield fleet


async def until_stopped(work: Work[object] | asyncio.Task[Any]) -> None:
    """Does *work*, which SIGTERM and Ctrl-C cancel; raises what it raises."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def report_error(message: str, code: int) -> None:
    """Says why the process ends: in its log where that is JSON lines, else in red on stderr."""
    if logs.are_json():
        log.error(message, action=_ACTIONS[code], exit_code=code)
    else:
        print_error(message)


def report_bug(error: Exception) -> None:
    """Logs or prints an exception that ends the process, with its traceback."""
    if logs.are_json():
        logs.log_unhandled(error, exit_code=EXIT_UNEXPECTED)
    else:
        text = "".join(traceback.format_exception(error))
        print_plain(redaction.message(text), stderr)


def print_error(message: str) -> None:
    """Prints each line of *message* in red on stderr."""
    with _LOSES_NOTES:
        for line in redaction.message(message).splitlines():
            stderr.print(untrusted(f"error: {line}", "red"), soft_wrap=True)


def print_warning(message: str) -> None:
    """Prints one yellow line on stderr; logs it where the log is JSON lines."""
    if logs.are_json():
        log.warning(message, action="warning")
        return
    with _LOSES_NOTES:
        stderr.print(
            untrusted(f"warning: {redaction.message(message)}", "yellow"),
            soft_wrap=True,
        )


def print_note(text: str) -> None:
    """Prints text on stderr, next to the command's own output: progress, hints."""
    with _LOSES_NOTES:
        print_plain(redaction.message(text), stderr)


def print_plain(text: str, to: Console = stdout) -> None:
    """Prints text without markup, highlighting, emoji for `:rocket:`, wrapping and controls."""
    to.print(
        redaction.printable(text),
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def table(
    names: Iterable[str],
    numbers: Iterable[str] = (),
    texts: Iterable[str] = (),
    *,
    rows: Iterable[Iterable[object]] = (),
) -> Table:
    """A table without vertical lines: a selected row is its text.

    Its columns are *names* (ids or addresses, too) and *numbers*, which `print_tables` neither cuts
    nor wraps, then *texts*. Cells are `untrusted`; numbers get their commas, and None is `-`.
    """
    made = Table(
        *(Column(name, no_wrap=True) for name in names),
        *(Column(number, justify="right", no_wrap=True) for number in numbers),
        *(Column(text, overflow="fold") for text in texts),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> Text:
    if value is None:
        return Text("-")
    return untrusted(f"{value:,}" if isinstance(value, int) else str(value))


def print_tables(*parts: ConsoleRenderable | str, to: Console = stdout) -> None:
    """Prints tables and text with whole names and figures; a terminal's width limits the rest."""
    if not to.is_terminal:
        to = Console(file=to.file, width=10_000)  # wider than any table
    for part in parts:
        keep_whole(part)
        to.print(
            untrusted(part) if isinstance(part, str) else part,
            crop=False,
            highlight=False,
        )


def keep_whole(part: ConsoleRenderable | str) -> None:
    """Gives the columns of names and figures in a table, or in a group's, their whole width."""
    for renderable in part.renderables if isinstance(part, Group) else [part]:
        for column in renderable.columns if isinstance(renderable, Table) else []:
            if column.no_wrap:
                texts = [*str(column.header).splitlines(), *map(str, column.cells)]
                column.min_width = max(map(cell_len, texts), default=0)


def untrusted(text: str, style: str = "") -> Text:
    """Text from elsewhere: neither markup nor a terminal's control sequences take effect."""
    return Text(redaction.printable(text), style)


def json_text(record: Any, indent: int | None = 2) -> str:
    """*record* as JSON with its end, times as ISO 8601; no string controls a terminal."""
    text = json.dumps(
        record, ensure_ascii=not _IS_UNICODE, indent=indent, default=datetime.isoformat
    )
    escaped = redaction.CONTROLS.sub(lambda sign: json.dumps(sign[0])[1:-1], text)
    return escaped + "\n"


def print_json(record: JSONObject | Sequence[Any], indent: int | None = 2) -> None:
    """Prints one JSON object (or list), whatever the terminal's width, colours and encoding."""
    sys.stdout.write(json_text(record, indent))
    # A closed pipe (`| head`) must show here, not as noise when Python exits.
    sys.stdout.flush()


#: The form of each document of a stream.
print_json_line = partial(print_json, indent=None)


def show(
    record: JSONObject | Sequence[Any],
    *parts: ConsoleRenderable | Facts | str,
    notes: Iterable[str] = (),
    as_json: bool,
) -> None:
    """Prints a result: *record* for a program; lines, facts, tables and *notes* for a person."""
    if as_json:
        print_json(record)
        return
    for note in notes:
        print_note(note)
    for part in parts:
        if isinstance(part, str):
            print_plain(part)
        elif isinstance(part, Mapping):
            print_facts(part)
        else:
            print_tables(part)


def write_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Writes a file whole or not at all, *private* for its owner alone; or raises SetupError."""
    # Half of a surrogate pair, which JSON can hold, cannot be encoded.
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        with files.whole(path) as draft:
            if private:
                draft.touch(mode=0o600)
            draft.write_bytes(data)
    except OSError as error:  # a full disk, which a scaler's ledger must outlive
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from None


def check_writable(path: Path | None) -> None:
    """Raises SetupError now, rather than after minutes of work, for a file that cannot be."""
    if path is not None:
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()


@contextlib.contextmanager
def only_one(path: Path, use: str = "") -> Iterator[None]:
    """Raises SetupError if another process of this user on this machine has *path* to itself.

    *use* tells apart what may be done with it at the same time.
    """
    named = f"{path.resolve()}{use}".encode()
    digest = hashlib.blake2b(named, digest_size=12).hexdigest()
    lock = Path(tempfile.gettempdir(), f"imagefleet-{os.getuid()}-{digest}.lock")
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise SetupError(
            f"another `imagefleet` is at work with {path}: wait for it or end it first"
        ) from None
    with held:
        yield


def confirm(question: str, *, yes: bool) -> None:
    """Asks, unless --yes; raises Exit for a no, and SetupError without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SetupError(f"{question} Cannot ask without a terminal: add --yes")
    if not typer.confirm(question, err=True):
        raise Exit(EXIT_OPERATOR_MUST_ACT)


def print_more(count: int, what: str, to: Console = stdout) -> None:
    """Says how many more there are than were printed, if there are."""
    if count > 0:
        print_plain(f"and {count:,} {what}", to)


def print_facts(facts: Facts, to: Console = stdout) -> None:
    """Prints names and facts, a line each; cells as in `table`."""
    for name, fact in facts.items():
        print_plain(f"{name:<18} {_cell(fact)}", to)


def totals(rows: Facts) -> Table:
    """A table of names and numbers, without a frame; cells as in `table`."""
    table = Table.grid(
        Column(style="bold"), Column(justify="right"), padding=(0, 2, 0, 0)
    )
    for name, value in rows.items():
        table.add_row(name, _cell(value))
    return table


#: Moves a bar on by one or by its argument, or to *done*.
Move = Callable[..., None]


@contextlib.contextmanager
def counting(
    verb: str,
    total: int | None,
    *,
    quiet: bool = False,
    unit: ProgressColumn | None = None,
) -> Iterator[Move]:
    """A bar on a terminal, which each call moves on."""
    if quiet or not stderr.is_terminal:
        yield lambda _count=1, **_to: None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        unit or MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    ) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda count=1, done=None, **more: bar.update(
            task, completed=done, advance=count, **more
        )


def counted(number: int, noun: str) -> str:
    """`1 job`, `1,200 jobs`."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def number(value: float | None, digits: int = 0) -> str:
    """`12,345`, or `-` for an unknown value."""
    return "-" if value is None else f"{value:z,.{digits}f}"  # never "-0.000"


def significant(value: float) -> str:
    """Three significant digits: `0.0312`, `4.95`, `4,954`."""
    if value == 0:
        return "0"
    if not 1e-9 < abs(value) < 1e12:  # noqa: PLR2004 - too many digits; and infinite, not a number
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(fraction: float | None) -> str:
    """`12.3 %`, or `-` for an unknown value."""
    return "-" if fraction is None else f"{fraction:.1%}".replace("%", " %")


def leave(code: int | None) -> NoReturn:
    """Exits at once where the engine's thread still runs.

    Python cannot end a thread that hangs in the GPU's driver or loads a model, and torch aborts
    the process when Python exits around it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would try again, and exit with another code
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if any(thread.name.startswith(ENGINE_THREAD) for thread in threading.enumerate()):
        os._exit(code or EXIT_DONE)
    sys.exit(code)

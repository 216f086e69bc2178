"""The terminal's side of every command: exit codes, one-line errors and pure JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from imagefleet import errors

EXIT_DONE = 0

#: A bug, or a fault that outlived its retries; a bug also prints its traceback.
EXIT_UNEXPECTED = 1

#: A setting, an argument, a credential or a resource is wrong: trying again changes nothing.
EXIT_OPERATOR_MUST_ACT = 2

#: This machine cannot do its work: a supervisor should replace it, not restart it.
EXIT_REPLACE_THIS_NODE = 3

#: What a shell reports of a program that Ctrl-C ended (128 + SIGINT).
EXIT_INTERRUPTED = 130

#: The worker's name for it, worker.gpu.THREAD_NAME; the console imports no room for it.
ENGINE_THREAD = "engine"

Result = TypeVar("Result")

stdout = Console()
stderr = Console(stderr=True)


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a command's coroutine; its errors end the command as `one_line_errors` says.

    Raises:
        typer.Exit: the command has failed and said why.
    """
    with one_line_errors():
        return asyncio.run(coroutine)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns a FleetError into one line on stderr and its exit code; bugs keep their traceback.

    Raises:
        typer.Exit: with the exit code that the error's class stands for.
    """
    try:
        yield
    except errors.FleetError as error:
        print_error(error.message)
        raise typer.Exit(_exit_code(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def print_error(message: str) -> None:
    """Each line of *message* as one red line on stderr, however narrow the terminal."""
    for line in message.splitlines():
        stderr.print(Text(f"error: {line}", style="red"), soft_wrap=True)


def print_json(record: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON object (or list) on stdout, untouched by the terminal's width and colours."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False, indent=2) + "\n")
    # A reader that has gone (`| head`) must show here, not as noise when Python exits.
    sys.stdout.flush()


def counted(number: int, noun: str) -> str:
    """`1 job`, `1,200 jobs`."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def number(value: float | None) -> str:
    """`12,345`, or `-` where it is not known."""
    return "-" if value is None else f"{value:,.0f}"


def percent(fraction: float | None) -> str:
    """`12.3 %`, or `-` where it is not known."""
    return "-" if fraction is None else f"{fraction:.1%}".replace("%", " %")


def leave(code: int | None) -> NoReturn:
    """Ends the process, whatever the engine's thread is in.

    A worker that hangs in its GPU's driver, or is told to stop while it loads a model, has a
    thread that Python cannot end; torch aborts the process when Python ends around it.
    """
    if any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or EXIT_DONE)
    sys.exit(code)


def _exit_code(error: errors.FleetError) -> int:
    if isinstance(error, errors.SetupError):
        return EXIT_OPERATOR_MUST_ACT
    if isinstance(error, errors.NodeError):
        return EXIT_REPLACE_THIS_NODE
    return EXIT_UNEXPECTED

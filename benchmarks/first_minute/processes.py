"""The processes of rows: what they are told, and what they print as it is measured."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rows.groups import Figures

SCRIPT = Path(__file__).with_name("row.py")

#: From SIGTERM, by which a row ends the processes that it has started, to SIGKILL.
ENDING_SECONDS = 15.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that a row takes, too."""
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/imagefleet-first-minute")
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int)
    parser.add_argument(
        "--memory", type=float, help="GB of the card that the GPU stands for"
    )
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument(
        "--trace",
        type=float,
        help="seconds drawn afterwards, to tell what the GPU does in them",
    )
    parser.add_argument("--tiny", action="store_true", help="a trial with tiny models")


def command(row: str, given: argparse.Namespace, **changes: Any) -> list[str]:
    """The command of a row's process, which begins now."""
    told = [sys.executable, str(SCRIPT), row, "--began-at", str(time.monotonic())]
    for name in ("folder", "device", "slots", "memory", "before", "trace"):
        value = changes.get(name, getattr(given, name))
        if value is not None:
            told += [f"--{name}", str(value)]
    return told + ["--tiny"] * given.tiny


async def figures_of(told: list[str], seconds: float) -> AsyncIterator[Figures]:
    """Yields figures as a process prints them, and last its exit code.

    It is ended after so many seconds; what else it prints goes to standard error.
    """
    process = await asyncio.create_subprocess_exec(
        *told, stdout=subprocess.PIPE, start_new_session=True, limit=2**20
    )
    try:
        async with asyncio.timeout(seconds):
            while process.stdout and (line := await process.stdout.readline()):
                found = read(line.decode(errors="replace"))
                if found is not None:
                    yield found
            await process.wait()
    except TimeoutError:
        yield {"ended_after_seconds": seconds}
    finally:
        await _end(process)
    yield {"exit_code": process.returncode}


def read(line: str) -> Figures | None:
    """The figures on a line of a row's output; another line is shown."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    print(line, end="", file=sys.stderr, flush=True)
    return None


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                await process.wait()
                return

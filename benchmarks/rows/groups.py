"""Rows of a benchmark whose groups have a process each, and the file of their results.

The processes load and compile at the same time. Once all are ready, or it takes too long, they
measure one row after the other while nothing else runs.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

Figures = dict[str, Any]

#: With little time left, a row is measured for less, but at least for this share.
LEAST_SHARE = 0.4

#: A row that takes this much longer than expected hangs.
OVERTIME_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement: its process, its seconds, and its overhead in seconds."""

    name: str
    group: str
    seconds: float
    overhead: float


class Group:
    """One process that measures rows: a script that serves them by `process.Channel`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.is_ready = False
        self._process = process

    @classmethod
    async def start(cls, script: Path, *arguments: str) -> "Group":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    async def wait_until_ready(self) -> None:
        """Returns once it is ready or the process has ended."""
        self.is_ready = bool((await self._read()).get("ready"))

    async def measure(
        self, row: str, seconds: float, timeout_seconds: float
    ) -> Figures:
        """The row's figures, or its error."""
        if self._process.stdin is None:
            raise RuntimeError("started without a pipe")
        command = {"row": row, "seconds": seconds}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_seconds):
                figures = await self._read()
        except TimeoutError:
            self.send(signal.SIGKILL)
            figures = {"error": "took far longer than expected"}
        if figures.pop("row", None) != row:
            self.is_ready = False
        return figures

    def send(self, number: signal.Signals) -> None:
        """Signals the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def end(self) -> None:
        self.send(signal.SIGKILL)
        await self._process.wait()

    async def _read(self) -> Figures:
        if self._process.stdout is None:
            raise RuntimeError("started without a pipe")
        line = await self._process.stdout.readline()
        if not line:
            return {
                "error": f"the process ended with code {await self._process.wait()}"
            }
        return cast("Figures", json.loads(line))


async def measure(
    rows: Sequence[Measurement],
    start: Callable[[str], Any],
    add: Callable[[str, Figures], None],
    *,
    ready_seconds: float,
    ends_at: float = float("inf"),
) -> None:
    """Measures the rows in their order, and calls *add* after each.

    Args:
        rows: the most valuable first: those for which no time is left are not measured.
        start: starts the process of a group; a coroutine function.
        add: called with a row's name and its figures.
        ready_seconds: what the processes may take until they are ready.
        ends_at: when measuring has to end, by `time.monotonic`.
    """
    groups: dict[str, Group] = {}
    waiting: list[asyncio.Task[None]] = []
    try:
        for name in dict.fromkeys(row.group for row in rows):
            groups[name] = await start(name)
            waiting.append(asyncio.create_task(groups[name].wait_until_ready()))
        await asyncio.wait(waiting, timeout=ready_seconds)
        for group in groups.values():
            if not group.is_ready:
                group.send(signal.SIGSTOP)
        for number, row in enumerate(rows):
            group, left = groups[row.group], ends_at - time.monotonic()
            seconds = min(row.seconds, left - row.overhead)
            if not group.is_ready:
                add(
                    row.name,
                    {"error": "its process failed or took too long to be ready"},
                )
            elif seconds < LEAST_SHARE * row.seconds:
                add(row.name, {"not_measured": f"only {left:.0f} s were left"})
            else:
                timeout = min(2 * (seconds + row.overhead) + OVERTIME_SECONDS, left)
                add(row.name, await group.measure(row.name, seconds, timeout))
            if all(later.group != row.group for later in rows[number + 1 :]):
                await group.end()  # leaves its memory to the others
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*(group.end() for group in groups.values()))


def add_figures(path: Path, figures: Figures) -> Figures:
    """Adds to the results in a file; returns all of them."""
    return change_figures(path, lambda results: results | figures)


def change_figures(path: Path, change: Callable[[Figures], Figures]) -> Figures:
    """Writes what *change* makes of the results in a file; returns it.

    A process that is killed leaves a whole file, and two lose nothing of each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with FileLock(path.with_suffix(".lock")):
        results = change(json.loads(path.read_text()) if path.exists() else {})
        part.write_text(json.dumps(results, indent=2) + "\n")
        part.replace(path)
    return results


def add_row(
    path: Path,
    summarise: Callable[[dict[str, Figures]], Figures],
    row: str,
    figures: Figures,
) -> None:
    """Adds a row's figures, and the main ones anew.

    A row that failed does not replace what an earlier run measured.
    """
    print(f"{row}: {json.dumps(figures)}", flush=True)
    rows: dict[str, Figures] = add_figures(path, {}).get("rows", {})
    if "error" not in figures or row not in rows:
        rows[row] = figures
    add_figures(path, {**summarise(rows), "rows": rows})


def quotient(one: float | None, other: float | None) -> float | None:
    """One figure over another; None if either was not measured."""
    return round(one / other, 4) if one is not None and other else None

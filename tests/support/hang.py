"""Ends a test that hangs, and says what it waits for.

A test hangs if for a minute neither its process nor any that it started runs or waits for a
processor. So a machine that is busy, or stands still, makes a test last as long as it needs, and
only what waits for something that never comes is ended.
"""

import asyncio
import contextlib
import linecache
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

HANG_SECONDS = 60.0

_LOOK_SECONDS = 5.0

#: The share of one core below which nothing happens: idle workers and servers poll, too.
_IDLE_SHARE = 0.1


class HangWatchdog(threading.Thread):
    """Watches this process and those below it while a test runs."""

    def __init__(self) -> None:
        super().__init__(name="hang watchdog", daemon=True)
        #: The running test's id; None between tests.
        self.test: str | None = None
        signal.signal(signal.SIGUSR1, self._fail)

    def run(self) -> None:
        test = None
        idle_seconds = 0.0
        active_before = 0.0
        while True:
            time.sleep(_LOOK_SECONDS)
            active = _active_seconds()
            is_idle = abs(active - active_before) < _IDLE_SHARE * _LOOK_SECONDS
            active_before = active
            if not is_idle or self.test is None or self.test != test:
                test = self.test
                idle_seconds = 0.0
                continue
            # Looks are counted, not the clock: a machine that stands does not make them.
            idle_seconds += _LOOK_SECONDS
            if idle_seconds >= HANG_SECONDS:
                idle_seconds = 0.0
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _fail(self, _signal: int, frame: FrameType | None) -> None:
        if self.test is not None:
            pytest.fail(
                f"hangs: nothing ran for {HANG_SECONDS:g} s. It waits at\n{_waiting(frame)}"
            )


def _active_seconds() -> float:
    """For how long this process, those below it and those that have ended ran or waited to run."""
    me = psutil.Process(os.getpid())
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system + times.children_user + times.children_system
        total += waiting_seconds(process.pid)
    return total


def waiting_seconds(pid: int) -> float:
    """For how long a process's threads waited for a processor; 0 where only Linux would tell."""
    total = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, nanoseconds, _ = path.read_text().split()
            total += int(nanoseconds) / 1e9
    return total


def _waiting(frame: FrameType | None) -> str:
    """The stacks of the main thread and of the event loop's tasks."""
    stacks = ["".join(traceback.format_stack(frame, limit=6))]
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return stacks[0]
    stacks += [
        f"{task.get_name()}:\n{_stack_of(task.get_coro())}"
        for task in asyncio.all_tasks(loop)
    ]
    return "\n".join(stacks)


def _stack_of(awaited: Any) -> str:
    """The lines at which a coroutine, and those that it awaits, are suspended."""
    lines = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            name = frame.f_code.co_filename
            number = frame.f_lineno
            code = linecache.getline(name, number).strip()
            lines.append(f'  File "{name}", line {number}\n    {code}\n')
        awaited = getattr(awaited, "cr_await", None) or getattr(
            awaited, "gi_yieldfrom", None
        )
    return "".join(lines)

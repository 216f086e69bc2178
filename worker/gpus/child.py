"""One GPU's worker process: as its parent sees it, and the parent as the worker sees it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from imagefleet.telemetry import logs
from worker import tasks
from worker.gpus.choice import Gpu
from worker.settings import WorkerSettings

log = logs.EventLog(__name__)

#: A worker that has not reported for this long hangs: it does every second, if its event loop
#: runs. As long as three failed liveness probes take on Kubernetes. A GPU that hangs ends its
#: worker by itself.
HUNG_SECONDS = 90.0

#: A worker reports a second or two after its start, before it imports torch; a slow disk may make
#: that a minute.
FIRST_REPORT_SECONDS = 300.0

#: Set by the parent; not a setting, and not passed on.
VARIABLE = "_IMAGEFLEET_GPU"

#: What a worker reports: that it starts, and that it draws.
STARTING, READY = b"starting\n", b"ready\n"

#: What the parent sends. A supervisor may send the first to all processes, so it means the same
#: however often it comes; Ctrl-C reaches the parent alone.
STOP, HURRY = signal.SIGTERM, signal.SIGINT

#: Seconds in which a killed process has ended, unless its driver hangs.
KILLED_SECONDS = 5.0


class Assignment(BaseModel):
    """The worker that a process is; *control* is its end of a socket to the parent."""

    control: int
    gpu: str
    name: str
    instance: str
    port: int = 0
    """The port of its metrics; 0: any."""
    price_per_hour: float | None = None


@dataclass(eq=False)
class Child:
    """One GPU's worker process; started by `run`, any number of times, one after the other."""

    gpu: Gpu
    _command: Sequence[str]
    _variables: Mapping[str, str]
    _assignment: Assignment
    is_ready: bool = False
    _process: asyncio.subprocess.Process | None = None
    _hangs_at: float = math.inf
    _told: signal.Signals | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    async def run(self) -> int:
        """Runs the process to its end; returns its exit code, or the negative of a signal."""
        ours, theirs = socket.socketpair()
        with theirs:
            assignment = self._assignment.model_copy(
                update={"control": theirs.fileno()}
            )
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                env={
                    **os.environ,
                    **self._variables,
                    VARIABLE: assignment.model_dump_json(),
                },
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent
            )
        self._process = process
        self._hangs_at = time.monotonic() + FIRST_REPORT_SECONDS
        log.info(
            f"the worker of GPU {self.gpu.name} is process {process.pid}",
            action="worker_started",
            gpu=self.gpu.name,
            process_id=process.pid,
        )
        if self._told is not None:  # before there was the process
            process.send_signal(self._told)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with tasks.background(self._read(reader), "read from a worker"):
                return await process.wait()
        finally:
            if process.returncode is None:
                self.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), KILLED_SECONDS)
            writer.close()
            self._process = None
            self.is_ready = False

    def tell(self, number: signal.Signals) -> None:
        """Sends STOP or HURRY, to a process that is yet to start as well."""
        self._told = number
        self._send(number)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill_if_hung(self) -> bool:
        """Kills the worker, and returns True, if it has not reported for too long.

        A killed one may stay: the system waits for its driver.
        """
        if self._process is None or time.monotonic() <= self._hangs_at:
            return False
        if not math.isinf(-self._hangs_at):
            log.error(
                f"the worker of GPU {self.gpu.name} has not reported for too long:"
                " killing it",
                action="worker_hangs",
                gpu=self.gpu.name,
            )
        self._hangs_at, self.is_ready = -math.inf, False
        self.kill()
        return True

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):  # a line that its end cut off
            while line := await reader.readline():
                self.is_ready = line == READY
                self._hangs_at = time.monotonic() + HUNG_SECONDS


class Member:
    """The parent as its worker sees it."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._control = socket.socket(fileno=assignment.control)
        self._control.set_inheritable(False)

    @classmethod
    def from_environment(cls) -> Member | None:
        """This process as its parent's member; None: it has no parent, as most workers."""
        given = os.environ.pop(VARIABLE, None)
        return None if given is None else cls(Assignment.model_validate_json(given))

    def settings(self, settings: WorkerSettings) -> WorkerSettings:
        return settings.model_copy(
            update={
                "name": self.assignment.name,
                "price_per_hour": self.assignment.price_per_hour,
                "device": "cpu" if settings.device == "cpu" else "cuda",
                "port": self.assignment.port,
            }
        )

    def report(self, *, is_ready: bool) -> bool:
        """Tells the parent that this worker's event loop runs; False: the parent is gone.

        To be called every second.
        """
        try:
            self._control.sendall(READY if is_ready else STARTING)
        except OSError:
            return False
        return True

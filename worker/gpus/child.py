"""One GPU's worker process: as its parent sees it, and the parent as the worker sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import aiohttp
from pydantic import BaseModel

from imagefleet.telemetry import logs
from worker import tasks
from worker.gpus.choice import Gpu
from worker.settings import WorkerSettings

log = logs.EventLog(__name__)

#: A busy worker answers within milliseconds: only its event loop has to run.
ANSWER_SECONDS = 3.0

#: A worker that has not answered for this long hangs; as long as three failed liveness probes take
#: on Kubernetes. A GPU that hangs ends its worker by itself.
HUNG_SECONDS = 90.0

#: A worker answers a second or two after its start, before it imports torch; a slow disk may make
#: that a minute.
FIRST_ANSWER_SECONDS = 300.0

#: Set by the parent; not a setting, and not passed on.
VARIABLE = "_IMAGEFLEET_GPU"

#: What the parent sends. Not signals, which a supervisor may send to the parent and to its
#: children: the second one would count as another.
STOP, HURRY = b"stop\n", b"hurry\n"

#: Seconds in which a killed process has ended, unless its driver hangs.
KILLED_SECONDS = 5.0

#: Seconds to hand jobs back after the parent's death, which takes ten seconds if the storage does
#: not answer. A new parent may have started on the same GPU already.
LAST_SECONDS = 15.0


class Assignment(BaseModel):
    """The worker that a process is; *control* is its end of a socket to the parent."""

    control: int
    gpu: str
    name: str
    instance: str
    price_per_hour: float | None = None
    share: float = 0.0
    """The worker's place among the machine's workers, from 0 to 1."""


@dataclass(eq=False)
class Child:
    """Started by `run`, any number of times, one after the other."""

    gpu: Gpu
    _command: Sequence[str]
    _variables: Mapping[str, str]
    _assignment: Assignment
    _client: aiohttp.ClientSession
    has_started: bool = False
    is_ready: bool = False
    _process: asyncio.subprocess.Process | None = None
    _control: asyncio.StreamWriter | None = None
    _port: int | None = None
    _answered_at: float = 0.0
    _is_hung: bool = False
    _words: list[bytes] = field(default_factory=list)

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
        self._process, self._answered_at, self._is_hung = (
            process,
            time.monotonic(),
            False,
        )
        text = f"the worker of GPU {self.gpu.name} is process {process.pid}"
        log.info(
            text, action="worker_started", gpu=self.gpu.name, process_id=process.pid
        )
        reader, self._control = await asyncio.open_connection(sock=ours)
        for word in self._words:  # which came before the process
            self._control.write(word)
        try:
            async with tasks.background(self._read(reader), "read from a worker"):
                return await process.wait()
        finally:
            if process.returncode is None:
                self.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), KILLED_SECONDS)
            self._control.close()
            self._process = self._control = self._port = None
            self.has_started = self.is_ready = False

    def say(self, word: bytes) -> None:
        """Sends STOP or HURRY, to a process that is yet to start as well."""
        self._words.append(word)
        if self._control is not None:
            self._control.write(word)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def probe(self) -> bool:
        """Asks the worker how it is; kills one that has not answered for too long.

        Returns whether it may still answer. A killed one may stay: the system waits for its driver.
        """
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            ready, _ = await self._ask("/ready")
            started, _ = await self._ask("/started")
            if self._port is not None:
                self.is_ready, self.has_started = ready, started
                self._answered_at = time.monotonic()
        limit = FIRST_ANSWER_SECONDS if self._port is None else HUNG_SECONDS
        if self._process is None or time.monotonic() - self._answered_at <= limit:
            return True
        if not self._is_hung:
            silence = f"has not answered for {limit:.0f} s: killing it"
            text = f"the worker of GPU {self.gpu.name} {silence}"
            log.error(text, action="worker_hangs", gpu=self.gpu.name)
        self._is_hung, self.is_ready = True, False
        self.kill()
        return False

    async def metrics(self) -> str | None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            is_there, text = await self._ask("/metrics")
            return text if is_there else None
        return None

    async def _ask(self, path: str) -> tuple[bool, str]:
        if self._port is None:
            return False, ""
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            self._client.get(f"http://127.0.0.1:{self._port}{path}") as answer,
        ):
            return answer.ok, await answer.text()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):  # a line that its end cut off
            while line := await reader.readline():
                self._port, self._answered_at = int(line), time.monotonic()


class Member:
    """The parent as its worker sees it."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._control = socket.socket(fileno=assignment.control)
        self._control.set_inheritable(False)
        self._on_word: Future[Callable[[bool], object]] = Future()
        # A thread: it also notices the parent's death while the event loop is busy or not there.
        threading.Thread(target=self._read, name="parent", daemon=True).start()

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
                "host": "127.0.0.1",
                "port": 0,
            }
        )

    def serves(self, port: int) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            self._control.sendall(b"%d\n" % port)

    def listen(
        self, loop: asyncio.AbstractEventLoop, on_word: Callable[[bool], object]
    ) -> None:
        """Calls *on_word* in *loop* for each word of the parent: True to end at once."""

        def deliver(hurries: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_word, hurries)

        self._on_word.set_result(deliver)

    def _read(self) -> None:
        with (
            self._control,
            contextlib.suppress(OSError),
            self._control.makefile("rb") as words,
        ):
            for word in words:
                self._on_word.result()(word == HURRY)
        with contextlib.suppress(TimeoutError):  # nobody listens yet
            self._on_word.result(LAST_SECONDS)(True)
        threading.Event().wait(LAST_SECONDS)
        os._exit(1)

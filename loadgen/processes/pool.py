"""The sending processes of a load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Self, cast

from imagefleet import errors
from imagefleet.storage.settings import Priority, StorageSettings
from loadgen.processes import frames
from loadgen.processes.frames import Refusals

#: Seconds after which a process that was told to end is killed.
END_SECONDS = 5.0


class SenderProcesses:
    """Processes that send batches; that of one that ends is sent again, which changes no image."""

    def __init__(
        self, settings: StorageSettings, priority: Priority, count: int, refusals: Refusals
    ) -> None:
        self._start = settings, priority
        self._count = count
        self._refusals = refusals
        self._processes: list[_Process] = []

    async def send(self, bodies: Iterable[str]) -> None:
        """Sends jobs; TransientError if the process has ended, SetupError if all of them have."""
        running = [each for each in self._processes if each.is_running]
        if not running:
            codes = ", ".join(f"{each.exit_code}" for each in self._processes)
            raise errors.SetupError(
                f"all processes that send have ended (exit codes: {codes}): is there enough memory?"
                " --processes 1 needs the least; the same command resumes"
            )
        await min(running, key=lambda each: each.in_flight).send(list(bodies))

    async def __aenter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._processes.append(await _Process.begin(self._start, self._refusals))
        except BaseException:
            await self._end(at_once=True)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self._end(at_once=kind is not None)

    async def _end(self, *, at_once: bool) -> None:
        await asyncio.gather(*(each.end(at_once=at_once) for each in self._processes))


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, refusals: Refusals) -> None:
        self._process = process
        self._to = cast("asyncio.StreamWriter", process.stdin)
        self._from = cast("asyncio.StreamReader", process.stdout)
        self._refusals = refusals
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[frames.Answer]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def begin(cls, start: frames.Start, refusals: Refusals) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the current folder may hold modules of other programs
            "-m",
            "loadgen.processes.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        begun = cls(process, refusals)
        begun._write(start)
        return begun

    @property
    def is_running(self) -> bool:
        return not self._reading.done()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def send(self, messages: list[str]) -> None:
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write((number, messages))
            if error := (await answered).error:
                raise error
        finally:
            del self._waiting[number]

    async def end(self, *, at_once: bool) -> None:
        if at_once:
            self._kill()
        self._to.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            self._kill()
        await self._reading

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _write(self, frame: frames.Start | frames.Batch) -> None:
        # Without a limit on the pipe's buffer: what is in flight is bounded by the sender.
        self._to.write(frames.packed(frame))

    async def _read(self) -> None:
        while (answer := await frames.read(self._from)) is not None:
            self._refusals.count += answer.refusals
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        code = await self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    errors.TransientError(f"a process that sends has ended (exit code {code})")
                )

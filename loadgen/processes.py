"""Several processes that send what one makes: one alone is at the limit of its core.

`python -m loadgen.processes` is one of them; it ends with its standard input.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import pickle
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterable
from typing import Any, Self, cast

from imagefleet import concurrency, errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import Priority, StorageSettings

#: Seconds after which a process that was told to end is killed.
END_SECONDS = 5.0

_LENGTH_BYTES = 8


class Refusals:
    """Counts requests that the storage was too busy for; they are made again, more slowly."""

    def __init__(self) -> None:
        self.count = 0
        self.policy = dataclasses.replace(concurrency.PATIENT, on_retry=self._note)

    def _note(self, error: errors.TransientError) -> None:
        self.count += isinstance(error, errors.BusyError)
        concurrency.log_retry(error)


class SenderProcesses:
    """Processes that send batches; that of one that ends is sent again, which changes no image."""

    def __init__(
        self,
        settings: StorageSettings,
        priority: Priority,
        count: int,
        refusals: Refusals,
    ) -> None:
        self._settings = settings
        self._priority = priority
        self._count = count
        self._refusals = refusals
        self._processes: list[_Process] = []

    async def send(self, bodies: Iterable[str]) -> None:
        """Sends jobs; TransientError if the process has ended, SetupError if all of them have."""
        running = [each for each in self._processes if not each.reading.done()]
        if not running:
            codes = ", ".join(f"{each.process.returncode}" for each in self._processes)
            raise errors.SetupError(
                f"all processes that send have ended (exit codes: {codes}): is there enough memory?"
                " --processes 1 needs the least; the same command resumes"
            )
        await min(running, key=lambda each: len(each.waiting)).send(list(bodies))

    async def __aenter__(self) -> Self:
        try:
            for _ in range(self._count):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the current folder may hold modules of other programs
                    "-m",
                    "loadgen.processes",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the parent
                )
                self._processes.append(_Process(process, self._refusals))
                # In the pipe, since the settings may hold the key.
                self._processes[-1].write((self._settings, self._priority))
        except BaseException as error:
            await self.__aexit__(error)
            raise
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        ends = (each.end(at_once=error is not None) for each in self._processes)
        await asyncio.gather(*ends)


class _Process:
    """A sending process, and the batches that it has in flight."""

    def __init__(self, process: asyncio.subprocess.Process, refusals: Refusals) -> None:
        self.process = process
        self._to = cast("StreamWriter", process.stdin)
        self._refusals = refusals
        self._numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[errors.FleetError | None]] = {}
        self.reading = asyncio.create_task(
            self._read(cast("StreamReader", process.stdout))
        )

    async def send(self, messages: list[str]) -> None:
        number = next(self._numbers)
        answered = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.write((number, messages))
            if error := await answered:
                raise error
        finally:
            del self.waiting[number]

    async def end(self, *, at_once: bool) -> None:
        if at_once:
            self._kill()
        self._to.close()
        try:
            await asyncio.wait_for(self.process.wait(), END_SECONDS)
        except TimeoutError:
            self._kill()
        await self.reading

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def write(self, frame: tuple[Any, ...]) -> None:
        # Without a limit on the pipe's buffer: what is in flight is bounded by the sender.
        self._to.write(_packed(frame))

    async def _read(self, answers: StreamReader) -> None:
        while (answer := await _next_frame(answers)) is not None:
            number, error, refusals = answer
            self._refusals.count += refusals
            self._answer(number, error)
        code = await self.process.wait()
        for number in self.waiting:
            self._answer(
                number,
                errors.TransientError(
                    f"a process that sends has ended (exit code {code})"
                ),
            )

    def _answer(self, number: int, error: errors.FleetError | None) -> None:
        waiting = self.waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(error)


def _packed(frame: tuple[Any, ...]) -> bytes:
    data = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES) + data


async def _next_frame(reader: StreamReader) -> Any:
    """The next frame; None at the end of the pipe."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
        return pickle.loads(await reader.readexactly(length))  # noqa: S301 - from our own process
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _serve() -> None:
    """Sends the batches that come, several at the same time, and answers each."""
    loop = asyncio.get_running_loop()
    reader = StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    pipe, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    writer = StreamWriter(pipe, protocol, None, loop)
    if (start := await _next_frame(reader)) is None:
        return
    settings, priority = start
    refusals = Refusals()

    async def send(number: int, messages: list[str]) -> None:
        error = None
        try:
            await storage.models.send(messages, priority)
        except errors.FleetError as caught:
            error = caught
        count, refusals.count = refusals.count, 0
        writer.write(_packed((number, error, count)))

    async with (
        open_storage(settings, refusals.policy) as storage,
        asyncio.TaskGroup() as group,
    ):
        sending: set[asyncio.Task[None]] = set()
        while (batch := await _next_frame(reader)) is not None:
            task = group.create_task(send(*batch))
            sending.add(task)
            task.add_done_callback(sending.discard)
        for task in sending:  # nobody waits for them
            task.cancel()


if __name__ == "__main__":
    asyncio.run(_serve())

"""A sending process, `python -m loadgen.processes.child`; it ends with its standard input."""

from __future__ import annotations

import asyncio
import sys
from asyncio import StreamReader, StreamWriter

from imagefleet import errors
from imagefleet.storage.open import open_storage
from loadgen.processes import frames


async def _serve(start: frames.Start, reader: StreamReader, writer: StreamWriter) -> None:
    """Sends batches, several at the same time, and answers each."""
    settings, priority = start
    refusals = frames.Refusals()

    async def send(number: int, messages: list[str]) -> None:
        error = None
        try:
            await storage.models.send(messages, priority)
        except errors.FleetError as caught:
            error = caught
        writer.write(frames.packed(frames.Answer(number, error, refusals.take())))

    async with open_storage(settings, refusals.policy) as storage, asyncio.TaskGroup() as group:
        sending: set[asyncio.Task[None]] = set()
        while (batch := await frames.read(reader)) is not None:
            task = group.create_task(send(*batch))
            sending.add(task)
            task.add_done_callback(sending.discard)
        for task in sending:  # nobody waits for them
            task.cancel()


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pipe, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = StreamWriter(pipe, protocol, None, loop)
    if (start := await frames.read(reader)) is not None:
        await _serve(start, reader, writer)


if __name__ == "__main__":
    asyncio.run(main())

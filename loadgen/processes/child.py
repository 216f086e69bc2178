"""A sending process: `python -m loadgen.processes.child`, started by a load.

It ends with the load, however that one ends: its standard input is then closed.
"""

from __future__ import annotations

import asyncio
import sys

from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import Priority
from loadgen.processes import frames
from loadgen.processes.frames import Refusals


class _Child:
    """Sends batches, several at the same time, and answers each."""

    def __init__(self, storage: Storage, priority: Priority, refusals: Refusals) -> None:
        self._storage = storage
        self._priority = priority
        self._refusals = refusals

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as group:
            sending: set[asyncio.Task[None]] = set()
            while (batch := await frames.read(reader)) is not None:
                task = group.create_task(self._send(batch, writer))
                sending.add(task)
                task.add_done_callback(sending.discard)
            for task in sending:  # nobody waits for them
                task.cancel()

    async def _send(self, batch: frames.Batch, writer: asyncio.StreamWriter) -> None:
        try:
            await self._storage.models.send(batch.messages, self._priority)
        except errors.FleetError as error:
            answer = frames.Answer.of(batch.number, error, self._refusals.take())
        else:
            answer = frames.Answer(batch.number, refusals=self._refusals.take())
        writer.write(frames.packed(answer))


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pipe, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(pipe, protocol, None, loop)
    start: frames.Start | None = await frames.read(reader)
    if start is None:
        return
    refusals = Refusals()
    async with open_storage(start.settings, refusals.policy) as storage:
        await _Child(storage, start.priority, refusals).run(reader, writer)


if __name__ == "__main__":
    asyncio.run(main())

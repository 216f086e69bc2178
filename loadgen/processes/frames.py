"""What a load and its sending processes say to each other."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from typing import Any, NamedTuple

from imagefleet import errors, retry
from imagefleet.storage.settings import Priority, StorageSettings

_LENGTH_BYTES = 8


#: The first frame for a sending process. It comes in a pipe, since it may hold the key.
Start = tuple[StorageSettings, Priority]

#: A batch's number, and the messages to send.
Batch = tuple[int, list[str]]


class Answer(NamedTuple):
    """The batch of this number was sent, unless there is an *error*."""

    number: int
    error: errors.FleetError | None
    refusals: int
    """How often the storage has asked to slow down since the last answer."""


def packed(frame: Start | Batch | Answer) -> bytes:
    data = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES) + data


async def read(reader: asyncio.StreamReader) -> Any:
    """The next frame; None at the end of the pipe."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
        return pickle.loads(await reader.readexactly(length))  # noqa: S301 - from our own process
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Refusals:
    """Counts requests that the storage was too busy for; they are made again, more slowly."""

    def __init__(self) -> None:
        self.count = 0
        self.policy = dataclasses.replace(retry.PATIENT, on_retry=self._note)

    def take(self) -> int:
        taken, self.count = self.count, 0
        return taken

    def _note(self, error: errors.TransientError) -> None:
        self.count += isinstance(error, errors.BusyError)
        retry.log_retry(error)

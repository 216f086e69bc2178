"""The operator's side of the poison queue: look at failed jobs, replay them, discard them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.storage import protocol
from imagefleet.storage.dead_letter import FailedJob

log = logging.getLogger(__name__)

#: How long a sweep keeps messages from others: killed, it leaves them invisible for so long.
LEASE_SECONDS = 60.0

#: What the lease grows by for each message that waits; a slow home hands out some 500 a second.
LEASE_SECONDS_A_MESSAGE = 0.01


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of the poison queue; *record* is None where it is no failed job's."""

    message: protocol.Message
    record: FailedJob | None

    @property
    def id(self) -> str:
        return self.record.id if self.record else self.message.id


@dataclass(frozen=True, slots=True)
class Selection:
    """Which failed jobs are meant: all conditions hold; none given means all jobs.

    *error* is found in the error's class or, in any case of letters, in its reason. *id* is the
    job's or the message's.
    """

    error: str | None = None
    campaign: str | None = None
    id: str | None = None

    def has(self, entry: Entry) -> bool:
        if self.id is not None and self.id not in {entry.id, entry.message.id}:
            return False
        record = entry.record
        if record is None:
            return self.error is None and self.campaign is None
        if self.campaign is not None and self.campaign != record.campaign:
            return False
        return self.error is None or (
            self.error.lower() in f"{record.error}: {record.reason}".lower()
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that was meant but stays, and why."""

    id: str
    reason: str


OnProgress = Callable[[int], None]


@dataclass(slots=True)
class Swept:
    """What a sweep did: messages moved or discarded, and those that it had to leave."""

    done: int = 0
    refused: list[Refused] = dataclasses.field(default_factory=list)


async def browse(storage: protocol.Storage, selection: Selection) -> AsyncIterator[Entry]:
    """Reads the failed jobs that are meant, without moving any."""
    async for message in storage.poison.browse():
        entry = Entry(message, FailedJob.read(message.body))
        if selection.has(entry):
            yield entry


async def replay(
    storage: protocol.Storage, selection: Selection, on_progress: OnProgress | None = None
) -> Swept:
    """Puts failed jobs back into the job queue as new messages, whose deliveries count from one.

    Added to the one queue before they are deleted from the other: a kill half-way sends some of
    them twice, under the same id, and loses none.
    """
    swept = Swept()

    async def send(entries: list[Entry]) -> list[str]:
        bodies: dict[str, str] = {}
        for entry in entries:
            try:
                bodies[entry.message.id] = await _message_of(entry, storage.blobs)
            except errors.JobError as error:
                swept.refused.append(Refused(entry.id, error.message))
        await storage.queue.send(bodies.values())
        return list(bodies)

    await _sweep(storage.poison, selection, send, swept, on_progress)
    return swept


async def discard(
    storage: protocol.Storage, selection: Selection, on_progress: OnProgress | None = None
) -> Swept:
    """Deletes failed jobs for good; what is no failed job's record goes only if its id is given."""
    swept = Swept()

    async def choose(entries: list[Entry]) -> list[str]:
        chosen = []
        for entry in entries:
            if entry.record is None and selection.id is None:
                swept.refused.append(Refused(entry.id, "it is no failed job's record"))
            else:
                chosen.append(entry.message.id)
        return chosen

    await _sweep(storage.poison, selection, choose, swept, on_progress)
    return swept


async def _message_of(entry: Entry, blobs: protocol.BlobStore) -> str:
    if entry.record is None:
        raise errors.JobError("it is no failed job's record")
    body = await entry.record.message(blobs)
    protocol.checked_messages([body])
    return body


async def _sweep(
    poison: protocol.JobQueue,
    selection: Selection,
    handle: Callable[[list[Entry]], Awaitable[list[str]]],
    swept: Swept,
    on_progress: OnProgress | None,
) -> None:
    """Sees each message once; deletes those whose ids *handle* returns, hands back the others.

    Others are held until the end: handed back at once, they would be received again. Ends when
    as many were seen as waited at the start, whatever a worker adds meanwhile.
    """
    waiting = (await poison.depth()).messages
    lease_seconds = min(
        LEASE_SECONDS + waiting * LEASE_SECONDS_A_MESSAGE, protocol.MAX_LEASE_SECONDS
    )
    held: dict[str, protocol.LeasedMessage] = {}
    try:
        while swept.done + len(held) < waiting:
            received = await poison.receive(protocol.MAX_RECEIVE, lease_seconds)
            fresh = [message for message in received if message.id not in held]
            # Without its body: a million of these are held at once.
            held.update({each.id: dataclasses.replace(each, body="") for each in received})
            if not fresh:
                break
            entries = [Entry(message, FailedJob.read(message.body)) for message in fresh]
            done = await handle([entry for entry in entries if selection.has(entry)])
            await _settle(poison.delete, [held[message_id] for message_id in done])
            for message_id in done:
                del held[message_id]
            swept.done += len(done)
            if on_progress is not None:
                on_progress(swept.done)
    finally:
        await _hand_back(poison, list(held.values()))


async def _hand_back(queue: protocol.JobQueue, messages: list[protocol.LeasedMessage]) -> None:
    for start in range(0, len(messages), protocol.MAX_RECEIVE):
        try:
            await _settle(queue.release, messages[start : start + protocol.MAX_RECEIVE])
        except errors.TransientError as error:
            log.warning(
                "failed jobs come back into view only when their lease ends: %s",
                error.message,
                extra={"action": "hand_back_failed"},
            )
            return


async def _settle(
    call: Callable[[protocol.LeasedMessage], Awaitable[None]],
    messages: Iterable[protocol.LeasedMessage],
) -> None:
    async def settle(message: protocol.LeasedMessage) -> None:
        # Lost: the lease ended on the way and another sweep has the message, which is its end too.
        with contextlib.suppress(errors.LeaseLost):
            await call(message)

    # All of them are waited for, also after an error: none may go on behind the caller's back.
    outcomes = await asyncio.gather(*map(settle, messages), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome

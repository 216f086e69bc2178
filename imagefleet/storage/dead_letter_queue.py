"""Failed jobs for the operator: list, replay and discard them.

They are listed by their records beside the images, since to read those hides none from other
readers. Notes there say what became of them, so that lists and counts leave them out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from imagefleet import concurrency, errors
from imagefleet.job.change import Change
from imagefleet.job.message import SafeId
from imagefleet.records.record import Record, RecordLog
from imagefleet.storage import protocol
from imagefleet.storage.dead_letter import Check, Entry, FailedJob, Selection
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import Priority

log = logging.getLogger(__name__)

#: Lease of the messages during a sweep; after a crash they stay invisible for so long.
LEASE_SECONDS = 60.0

#: Added for each message in the queue: a slow storage delivers some 500 messages/s.
LEASE_SECONDS_PER_MESSAGE = 0.01

#: Prompts and refused records that a preview has.
PREVIEWED = 5

#: Changes that a preview counts: each prompt may be another.
MAX_CHANGES = 500

NO_CHECK = Check()

_CAMPAIGN: TypeAdapter[str | None] = TypeAdapter(SafeId | None)

_Outcome = Literal["replayed", "discarded"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A selected message that stays in the queue, and why."""

    id: str
    reason: str
    is_unsigned: bool = False


OnProgress = Callable[[int], None]


@dataclass(slots=True)
class Swept:
    """The result of a sweep: messages replayed or discarded, and those that stay."""

    done: int = 0
    refused: list[Refused] = dataclasses.field(default_factory=list)
    has_seen_all: bool = False
    """Whether no message was hidden: by another reader, or one that was killed."""


async def unrecorded(storage: Storage) -> int:
    """How many messages have no record, about: copies, or what a killed worker or replay left."""
    waiting = (await storage.poison.depth()).messages
    if waiting:
        async for _ in recorded(storage, Selection()):
            waiting -= 1
    return max(0, waiting)


async def find(storage: Storage, selection: Selection) -> AsyncIterator[Entry]:
    """The selected failed jobs that a sweep would find, by messages if some have no record."""
    read = browse if await unrecorded(storage) else recorded
    async for entry in read(storage, selection):
        yield entry


async def recorded(storage: Storage, selection: Selection) -> AsyncIterator[Entry]:
    """The selected jobs that have failed and were neither replayed nor discarded, by records."""
    from imagefleet.records import reader  # numpy is slow to import

    try:
        _CAMPAIGN.validate_python(selection.campaign)
    except ValidationError:  # no job has such a campaign
        return
    async for record in reader.ended(storage, selection.campaign):
        if record.outcome == "failed" and selection.matches(entry := Entry.of(record)):
            yield entry


async def browse(storage: Storage, selection: Selection) -> AsyncIterator[Entry]:
    """Iterates over the selected failed jobs, each once, without moving them."""
    seen: set[str] = set()
    async for message in storage.poison.browse():
        entry = Entry(message, FailedJob.parse(message.body))
        if selection.matches(entry) and entry.source not in seen:
            seen.add(entry.source)
            yield entry


@dataclass(slots=True)
class Preview:
    """What a replay would send, by campaign and error, and what would stay."""

    count: int = 0
    kinds: Counter[tuple[str | None, str]] = dataclasses.field(default_factory=Counter)
    prompts: list[str] = dataclasses.field(default_factory=list)
    unsigned: int = 0
    refused: int = 0
    """Messages refused, besides those that are not signed; *reasons* has the first."""
    reasons: list[Refused] = dataclasses.field(default_factory=list)
    changes: Counter[tuple[str, str, str]] = dataclasses.field(default_factory=Counter)
    """Fields whose values change, from and to what, in JSON; not more than some hundred."""

    def compare(self, change: Change, body: str) -> None:
        """Counts what a message's fields become."""
        for name, values in change.differences(body).items():
            before, after = (json.dumps(each, ensure_ascii=False) for each in values)
            key = name, before, after
            if key in self.changes or len(self.changes) < MAX_CHANGES:
                self.changes[key] += 1


async def preview(storage: Storage, selection: Selection, check: Check) -> Preview:
    """Reads what a replay would send, and moves nothing."""
    found = Preview()
    async for entry in find(storage, selection):
        try:
            _, job = await check.job(entry, storage.blobs)
            if check.change is not None and entry.record is not None:
                found.compare(check.change, await entry.record.message(storage.blobs))
        except errors.UntrustedJobError:
            found.unsigned += 1
        except errors.JobError as error:
            found.refused += 1
            if len(found.reasons) < PREVIEWED:
                found.reasons.append(Refused(entry.id, error.message))
        else:
            found.count += 1
            error_class = entry.record.error if entry.record else ""
            found.kinds[job.campaign if job else None, error_class] += 1
            if job is not None and len(found.prompts) < PREVIEWED:
                found.prompts.append(job.prompt)
    return found


async def replay(
    storage: Storage,
    selection: Selection,
    on_progress: OnProgress | None = None,
    check: Check = NO_CHECK,
    priority: Priority = "normal",
) -> Swept:
    """Puts failed jobs back into the job queue of *priority*, with a fresh delivery count.

    They are new messages. Those that *check* refuses stay.

    Jobs are added to the job queue, then noted as replayed, then deleted from the poison queue. A
    crash in between leaves messages there that the next replay sends once more, with the same id,
    and loses none.
    """
    swept = Swept()
    notes = Notes(storage)

    async def send(entries: list[Entry]) -> list[str]:
        bodies: dict[str, str] = {}
        await notes.check(entries)
        for entry in entries:
            try:
                bodies[entry.message.id], _ = await check.job(entry, storage.blobs)
            except errors.JobError as error:
                is_unsigned = isinstance(error, errors.UntrustedJobError)
                swept.refused.append(Refused(entry.id, error.message, is_unsigned))
        await storage.models.send(bodies.values(), priority)
        await notes.add((each for each in entries if each.message.id in bodies), "replayed")
        return list(bodies)

    await _sweep(storage.poison, selection, send, swept, on_progress)
    return swept


async def discard(
    storage: Storage,
    selection: Selection,
    on_progress: OnProgress | None = None,
    keep_signed: Check | None = None,
    *,
    completed: bool = False,
) -> Swept:
    """Deletes failed jobs; a message that is not a record only if it is selected by its id.

    *keep_signed*: deletes whatever is not signed with that check's keys, and nothing else.
    *completed*: only jobs that were sent again since, and whose images are all stored.

    They are noted as discarded first: a crash leaves messages that no list counts, and that the
    same call deletes. Failed jobs of which only the records are left are noted as well.
    """
    swept = Swept()
    notes = Notes(storage)
    noted: set[str | None] = set()

    async def choose(entries: list[Entry]) -> list[str]:
        await notes.check(entries)
        chosen = await to_discard(storage, entries, keep_signed, completed=completed)
        if keep_signed is None and selection.id is None:
            strange = [each for each in chosen if each.record is None]
            chosen = [each for each in chosen if each.record is not None]
            swept.refused.extend(
                Refused(each.id, "it is not a record of a failed job") for each in strange
            )
        noted.update(entry.record.source for entry in chosen if entry.record)
        if keep_signed is None:  # else one that is made up may pass for one that stays
            await notes.add(chosen, "discarded")
        return [entry.message.id for entry in chosen]

    def may_be_left(entry: Entry) -> bool:
        has_no_message = swept.has_seen_all and entry.message.enqueued_at < began_at
        return has_no_message or keep_signed is not None

    began_at = datetime.now(UTC)
    await _sweep(storage.poison, selection, choose, swept, on_progress)
    async for some in in_batches(recorded(storage, selection)):
        left = list(filter(may_be_left, some))
        left = await to_discard(storage, left, keep_signed, completed=completed)
        await notes.add(left, "discarded")
        swept.done += sum(entry.message.id not in noted for entry in left)
    return swept


async def to_discard(
    storage: Storage, entries: list[Entry], keep_signed: Check | None, *, completed: bool
) -> list[Entry]:
    """Those of *entries* that `discard` with the same arguments deletes."""
    if completed:
        done = await are_completed(storage, entries)
        entries = list(itertools.compress(entries, done))
    if keep_signed is None:
        return entries
    return [each for each in entries if not await keep_signed.is_signed(each, storage.blobs)]


async def in_batches(entries: AsyncIterator[Entry]) -> AsyncIterator[list[Entry]]:
    """The same, some at a time; the last batch may be empty."""
    batch: list[Entry] = []
    async for entry in entries:
        batch.append(entry)
        if len(batch) == protocol.MAX_RECEIVE:
            yield batch
            batch = []
    yield batch


async def _sweep(
    poison: protocol.JobQueue,
    selection: Selection,
    handle: Callable[[list[Entry]], Awaitable[list[str]]],
    swept: Swept,
    on_progress: OnProgress | None,
) -> None:
    """Receives each message once; deletes those whose ids *handle* returns, releases the others.

    A copy of a failure that was handled is deleted, too. The others are released at the end, lest
    they be received again. The sweep ends after as many messages as were in the queue at its start,
    whatever workers add meanwhile.
    """
    waiting = (await poison.depth()).messages
    lease_seconds = min(
        LEASE_SECONDS + waiting * LEASE_SECONDS_PER_MESSAGE, protocol.MAX_LEASE_SECONDS
    )
    leased: dict[str, protocol.LeasedMessage] = {}
    seen: set[str] = set()
    deleted = 0
    try:
        while deleted + len(leased) < waiting:
            received = await poison.receive(protocol.MAX_RECEIVE, lease_seconds)
            fresh = [message for message in received if message.id not in leased]
            # Without the body: there may be a million.
            leased.update({each.id: dataclasses.replace(each, body="") for each in received})
            if not fresh:
                break
            entries = [Entry(message, FailedJob.parse(message.body)) for message in fresh]
            chosen: list[Entry] = []
            copies: list[str] = []
            for entry in filter(selection.matches, entries):
                if entry.source in seen:
                    copies.append(entry.message.id)
                else:
                    seen.add(entry.source)
                    chosen.append(entry)
            done = await handle(chosen)
            await _settle(poison.delete, [leased[each] for each in (*done, *copies)])
            for message_id in (*done, *copies):
                del leased[message_id]
            deleted += len(done) + len(copies)
            swept.done += len(done)
            if on_progress is not None:
                on_progress(swept.done)
        swept.has_seen_all = deleted + len(leased) >= waiting
    finally:
        await _hand_back(poison, list(leased.values()))


async def _hand_back(queue: protocol.JobQueue, messages: list[protocol.LeasedMessage]) -> None:
    for start in range(0, len(messages), protocol.MAX_RECEIVE):
        try:
            await _settle(queue.release, messages[start : start + protocol.MAX_RECEIVE])
        except errors.TransientError as error:
            log.warning(
                "failed jobs stay invisible until their leases expire: %s",
                error.message,
                extra={"action": "hand_back_failed"},
            )
            return


async def _settle(
    call: Callable[[protocol.LeasedMessage], Awaitable[None]],
    messages: Iterable[protocol.LeasedMessage],
) -> None:
    async def settle(message: protocol.LeasedMessage) -> None:
        # Lost: the lease expired and another sweep has the message, which will settle it.
        with contextlib.suppress(errors.LeaseLost):
            await call(message)

    # Waits for all, even after an error, so that none goes on in the background.
    outcomes = await asyncio.gather(*map(settle, messages), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def are_completed(storage: Storage, entries: Sequence[Entry]) -> list[bool]:
    """Whether all images of each job are stored since: a read for each, or six if there is none."""
    return list(await concurrency.gather(*(_is_completed(storage, each) for each in entries)))


async def _is_completed(storage: Storage, failed: Entry) -> bool:
    from imagefleet.records import outcomes

    if failed.record is None:
        return False
    job = outcomes.JobFacts(failed.record.id, failed.record.campaign)
    return outcomes.are_all(await outcomes.stored_images(storage, job))


class Notes:
    """Writes what became of failed jobs."""

    def __init__(self, storage: Storage) -> None:
        self._log = RecordLog(storage.blobs, "operator")
        self._is_checked = False

    async def check(self, entries: Iterable[Entry]) -> None:
        """Raises SetupError if the credentials do not allow notes on these, before a change."""
        if not self._is_checked and (first := next(iter(_notes(entries, "replayed")), None)):
            await self._log.check(first.campaign)
            self._is_checked = True

    async def add(self, entries: Iterable[Entry], outcome: _Outcome) -> None:
        """Notes it of each failure; a failure of the same job that comes later is another."""
        await self._log.add(_notes(entries, outcome))


def _notes(entries: Iterable[Entry], outcome: _Outcome) -> list[Record]:
    now = datetime.now(UTC)
    failures = [each.record for each in entries if each.record and each.record.source]
    return [
        Record(
            outcome=outcome, id=failure.id, campaign=failure.campaign, at=now, source=failure.source
        )
        for failure in failures
    ]

"""Failed jobs for the operator: list, replay and discard them.

They are listed by their records beside the images, since to read those hides none from other
readers. Notes among the files say what became of them, so that lists and counts leave them out.
"""

import contextlib
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from imagefleet import concurrency, errors
from imagefleet.job.message import SafeId
from imagefleet.records import ledger
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage import protocol
from imagefleet.storage.dead_letter import (
    Check,
    Chosen,
    Entry,
    FailedJob,
    Refused,
    Selection,
)
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import Priority
from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

#: Lease of the messages during a sweep; after a crash they stay invisible for so long.
LEASE_SECONDS = 60.0

#: Added for each message in the queue: a slow storage delivers some 500 messages/s.
LEASE_SECONDS_PER_MESSAGE = 0.01

#: Prompts and refused records that a preview has.
PREVIEWED = 5

#: Changes that a preview counts: each prompt may be another.
MAX_CHANGES = 500

NO_CHECK = Check()

_NOTED = {"id", "campaign", "source", "digest"}

_CAMPAIGN: TypeAdapter[str | None] = TypeAdapter(SafeId | None)

OnProgress = Callable[[int], None]


@dataclass(slots=True)
class Swept:
    """The result of a sweep: messages replayed or discarded, and those that stay."""

    done: int = 0
    refused: list[Refused] = dataclasses.field(default_factory=list)
    missing: int = 0
    """Failed jobs whose messages are hidden by another reader or gone, so they were not sent."""


@dataclass(slots=True)
class Preview:
    """Preview of a sweep: failed jobs it would move, by campaign and error, and those that stay."""

    count: int = 0
    kinds: Counter[tuple[str | None, str]] = dataclasses.field(default_factory=Counter)
    prompts: list[str] = dataclasses.field(default_factory=list)
    unsigned: int = 0
    refused: int = 0
    """Messages refused, besides those that are not signed; *reasons* has the first."""
    reasons: list[Refused] = dataclasses.field(default_factory=list)
    changes: Counter[tuple[str, str, str]] = dataclasses.field(default_factory=Counter)
    """Fields whose values change, from and to what, in JSON; not more than some hundred."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Chooses jobs to delete.

    *keep_signed*: whatever is not signed with that check's keys, and nothing else. *completed*:
    only jobs that were sent again since, and whose images are all stored.
    """

    keep_signed: Check | None = None
    completed: bool = False

    async def choose(
        self, storage: Storage, entries: list[Entry], selection: Selection
    ) -> tuple[list[Chosen], list[Refused]]:
        """Splits entries into those to delete, and those that stay though they were selected."""
        if self.completed:
            works = (is_completed(storage, entry) for entry in entries)
            entries = [*itertools.compress(entries, await concurrency.gather(*works))]
        if (check := self.keep_signed) is not None:
            entries = [
                each
                for each in entries
                if not await check.is_signed(each, storage.blobs)
            ]
        if check is not None or selection.id is not None:
            return [Chosen(entry) for entry in entries], []
        reason = "it is not a record of a failed job"
        strange = [
            Refused(entry.id, reason) for entry in entries if entry.record is None
        ]
        return [Chosen(entry) for entry in entries if entry.record], strange


ALL = Discard()


async def unrecorded(storage: Storage) -> int:
    """Estimated number of messages without a record: copies, or what a killed process left."""
    waiting = (await storage.poison.depth()).messages
    if waiting:
        async for _ in recorded(storage, Selection()):
            waiting -= 1
    return max(0, waiting)


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


async def in_batches(entries: AsyncIterator[Entry]) -> AsyncIterator[list[Entry]]:
    """Groups entries into batches; the last batch may be empty."""
    batch: list[Entry] = []
    async for entry in entries:
        batch.append(entry)
        if len(batch) == protocol.MAX_RECEIVE:
            yield batch
            batch = []
    yield batch


async def preview(
    storage: Storage, selection: Selection, choice: Check | Discard
) -> Preview:
    """Reads what a sweep would move, by messages if some have no record, and moves nothing."""
    found = Preview()
    read = browse if await unrecorded(storage) else recorded
    async for some in in_batches(read(storage, selection)):
        chosen, refused = await choice.choose(storage, some, selection)
        others = [each for each in refused if not each.is_unsigned]
        found.refused += len(others)
        found.unsigned += len(refused) - len(others)
        found.reasons += others[: PREVIEWED - len(found.reasons)]
        found.count += len(chosen)
        for entry, _, job in chosen:
            record = entry.record
            campaign = job.campaign if job else record.campaign if record else None
            found.kinds[campaign, record.error if record else ""] += 1
            if job is not None and len(found.prompts) < PREVIEWED:
                found.prompts.append(job.prompt)
            if isinstance(choice, Check) and choice.change and record:
                body = await record.message(storage.blobs)
                for name, values in choice.change.differences(body).items():
                    before, after = (
                        json.dumps(each, ensure_ascii=False) for each in values
                    )
                    key = name, before, after
                    if key in found.changes or len(found.changes) < MAX_CHANGES:
                        found.changes[key] += 1
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
    records = RecordLog(storage.files, "operator")
    began_at = storage.blobs.clock.now()

    async def send(entries: list[Entry]) -> list[Entry]:
        chosen, refused = await check.choose(storage, entries, selection)
        swept.refused += refused
        sent = [entry for entry, _, _ in chosen]
        # Those stay that have failed only as their worker could not see that they were drawn.
        bodies = [
            body
            for entry, body, _ in chosen
            if not (_has_taken_name(entry) and await is_completed(storage, entry))
        ]
        await storage.models.send(bodies, priority)
        if check.change is not None:  # other jobs now, of the same ids
            await ledger.note(storage, bodies)
        await records.add(_notes(sent, "replayed", storage.blobs.clock.now()))
        return sent

    await _sweep(storage, selection, records, send, swept, on_progress)
    refused_ids = {refused.id for refused in swept.refused}
    async for entry in recorded(storage, selection):
        swept.missing += (
            entry.id not in refused_ids and entry.message.enqueued_at < began_at
        )
    return swept


async def discard(
    storage: Storage,
    selection: Selection,
    on_progress: OnProgress | None = None,
    choice: Discard = ALL,
) -> Swept:
    """Deletes failed jobs; a message that is not a record only if it is selected by its id.

    They are noted as discarded first: a crash leaves messages that no list counts, and that the
    same call deletes. Failed jobs of which only the records are left are noted as well.
    """
    swept = Swept()
    records = RecordLog(storage.files, "operator")
    noted: set[str | None] = set()
    began_at = storage.blobs.clock.now()

    async def choose(entries: list[Entry]) -> list[Entry]:
        found, refused = await choice.choose(storage, entries, selection)
        swept.refused += refused
        chosen = [entry for entry, _, _ in found]
        noted.update(entry.record.source for entry in chosen if entry.record)
        if (
            choice.keep_signed is None
        ):  # else one that is made up may pass for one that stays
            await records.add(_notes(chosen, "discarded", storage.blobs.clock.now()))
        return chosen

    is_hidden = not await _sweep(
        storage, selection, records, choose, swept, on_progress
    )
    async for some in in_batches(recorded(storage, selection)):
        gone = some
        if choice.keep_signed is None:
            gone = [
                each
                for each in some
                if not is_hidden and each.message.enqueued_at < began_at
            ]
        left = [
            entry for entry, _, _ in (await choice.choose(storage, gone, selection))[0]
        ]
        await records.add(_notes(left, "discarded", storage.blobs.clock.now()))
        swept.done += sum(entry.message.id not in noted for entry in left)
    return swept


async def _sweep(
    storage: Storage,
    selection: Selection,
    records: RecordLog,
    handle: Callable[[list[Entry]], Awaitable[list[Entry]]],
    swept: Swept,
    on_progress: OnProgress | None,
) -> bool:
    """Receives each message once; deletes those that *handle* returns, releases the others.

    A copy of a failure that was handled is deleted, too. The others are released at the end, lest
    they be received again. The sweep ends after as many messages as were in the queue at its start,
    whatever workers add meanwhile. False: some were hidden, by another reader or a killed one.
    """
    poison = storage.poison
    waiting = (await poison.depth()).messages
    lease_seconds = min(
        LEASE_SECONDS + waiting * LEASE_SECONDS_PER_MESSAGE, protocol.MAX_LEASE_SECONDS
    )
    leased: dict[str, protocol.LeasedMessage] = {}
    seen: set[str] = set()
    deleted = 0
    is_allowed = False
    try:
        while deleted + len(leased) < waiting:
            received = await poison.receive(protocol.MAX_RECEIVE, lease_seconds)
            fresh = [message for message in received if message.id not in leased]
            # Without the body: there may be a million.
            leased.update(
                {each.id: dataclasses.replace(each, body="") for each in received}
            )
            if not fresh:
                break
            entries = [
                Entry(message, FailedJob.parse(message.body)) for message in fresh
            ]
            chosen: list[Entry] = []
            settled: list[Entry] = []
            for entry in filter(selection.matches, entries):
                (settled if entry.source in seen else chosen).append(entry)
                seen.add(entry.source)
            if not is_allowed and (
                notes := _notes(chosen, "discarded", storage.blobs.clock.now())
            ):
                # Raises SetupError, before a change, if the credentials do not allow notes.
                await records.open(notes[0].campaign, "settled")
                is_allowed = True
            done = await handle(chosen)
            settled += done
            await _settle(poison.delete, [leased[each.message.id] for each in settled])
            for entry in settled:
                del leased[entry.message.id]
            deleted += len(settled)
            swept.done += len(done)
            if on_progress is not None:
                on_progress(swept.done)
        return deleted + len(leased) >= waiting
    finally:
        try:
            await _settle(poison.release, leased.values())
        except errors.TransientError as error:
            log.warning(
                f"failed jobs stay invisible until their leases expire: {error.message}",
                action="hand_back_failed",
            )


async def _settle(
    call: Callable[[protocol.LeasedMessage], Awaitable[None]],
    messages: Iterable[protocol.LeasedMessage],
) -> None:
    async def settle(message: protocol.LeasedMessage) -> None:
        # Lost: the lease expired and another sweep has the message, which will settle it.
        with contextlib.suppress(errors.LeaseLost):
            await call(message)

    await concurrency.for_each(messages, settle, protocol.MAX_RECEIVE)


def _has_taken_name(failed: Entry) -> bool:
    return (
        failed.record is not None
        and failed.record.error == errors.NameTakenError.__name__
    )


async def is_completed(storage: Storage, failed: Entry) -> bool:
    """True if all images of a job are stored since: a read for each, or six if there is none.

    Those may be of the job as it was mended; but not where another job has its name.
    """
    from imagefleet.records import decisions

    if failed.record is None:
        return False
    images = await decisions.stored_images(
        storage.blobs, failed.record.campaign, failed.record.id
    )
    if not decisions.are_all(images):
        return False
    return not _has_taken_name(failed) or images[-1].digest == failed.record.digest


def _notes(
    entries: Iterable[Entry], outcome: Literal["replayed", "discarded"], now: datetime
) -> list[Record]:
    """Records of what became of each failure; a later failure of the same job is another."""
    return [
        Record(outcome=outcome, at=now, **each.record.model_dump(include=_NOTED))
        for each in entries
        if each.record and each.record.source
    ]

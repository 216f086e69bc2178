"""Failed jobs for the operator: list, replay and discard them.

Their records beside the images are what counts: to read those hides none from other readers. Notes
among the files say what became of them. The messages in the poison queue show other programs how
many there are, and are deleted once their failure is noted.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from imagefleet import concurrency
from imagefleet.errors import LeaseLost, TransientError
from imagefleet.job.message import is_safe_id
from imagefleet.records import ledger
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage import bundle
from imagefleet.storage.dead_letter import Check, FailedJob, Refused, Selection
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import (
    MAX_LEASE_SECONDS,
    MAX_RECEIVE,
    LeasedMessage,
    Message,
    OnProgress,
)
from imagefleet.storage.settings import Priority
from imagefleet.telemetry.logs import log

#: Lease of the poison queue's messages; after a crash they stay invisible for so long.
LEASE_SECONDS = 60.0

#: Added for each message in the queue: a slow storage delivers some 500 messages/s.
LEASE_SECONDS_PER_MESSAGE = 0.01

#: Prompts and refused records that a preview has.
PREVIEWED = 5

NO_CHECK = Check()

_NOTED = {"id", "campaign", "source", "digest"}


@dataclass
class Swept:
    """Number of failed jobs that were replayed or discarded, and those that stay."""

    done: int = 0
    refused: list[Refused] = field(default_factory=list)


@dataclass
class Preview:
    """Failed jobs that would be moved, by campaign and error, and those that would stay."""

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompts: list[str] = field(default_factory=list)
    refused: int = 0
    #: The first of those that are refused.
    reasons: list[Refused] = field(default_factory=list)


async def recorded(storage: Storage, selection: Selection) -> AsyncIterator[Record]:
    """The selected jobs, which were neither replayed nor discarded since."""
    from imagefleet.records import reader  # numpy is slow to import

    campaign = selection.campaign
    if campaign is not None and not is_safe_id(campaign):  # no job has such a one
        return
    async for record in reader.ended(storage, campaign):
        if selection.matches(record):
            yield record


async def in_batches(records: AsyncIterator[Record]) -> AsyncIterator[list[Record]]:
    """Groups records into batches; the last batch may be empty."""
    batch = []
    async for record in records:
        batch.append(record)
        if len(batch) == MAX_RECEIVE:
            yield batch
            batch = []
    yield batch


async def preview(
    storage: Storage, selection: Selection, check: Check | None
) -> Preview:
    """Reads what `replay` with *check* would move, or `discard` without, and moves nothing."""
    found = Preview()
    async for record in recorded(storage, selection):
        if check is not None:
            chosen, refused = check.choose([record])
            found.refused += len(refused)
            found.reasons += refused[: PREVIEWED - len(found.reasons)]
            if not chosen:
                continue
            if len(found.prompts) < PREVIEWED:
                found.prompts.append(chosen[0].job.prompt)
        found.kinds[record.campaign, record.error or record.outcome] += 1
    return found


async def replay(
    storage: Storage,
    selection: Selection,
    on_progress: OnProgress | None = None,
    check: Check = NO_CHECK,
    priority: Priority = "normal",
) -> Swept:
    """Puts failed jobs back into the job queue of *priority*, with a fresh delivery count.

    They are new messages, bundles where they are many. Those that *check* refuses stay.

    Jobs are added to the job queue, then noted as replayed, then deleted from the poison queue. A
    crash before the note has the next replay send them once more, with the same id, and loses none.
    """
    swept = Swept()
    records = RecordLog(storage.files, "operator")
    waiting = (await storage.poison.depth()).messages
    async for batch in in_batches(recorded(storage, selection)):
        chosen, refused = check.choose(batch)
        swept.refused += refused
        for campaign in {each.record.campaign for each in chosen}:
            # Raises SetupError, before a change, if the credentials do not allow notes.
            await records.open(campaign, "settled")
        bodies = [each.body for each in chosen]
        jobs = [bundle.Sent(body) for body in bodies]
        # Dropped jobs have no messages there: how many they are shows as they are sent.
        per_message = bundle.jobs_per_bundle(max(waiting, swept.done))
        messages = bundle.bundled(jobs, per_message, bundle.any_name)
        await storage.models.send(messages, priority)
        if check.change is not None:  # other jobs now, of the same ids
            await ledger.note(storage, bodies)
        sent = [each.record for each in chosen]
        await _note(storage, records, sent, "replayed")
        swept.done += len(sent)
        if on_progress is not None:
            on_progress(swept.done)
    await _clean(storage, spares_others=True)
    return swept


async def discard(
    storage: Storage, selection: Selection, on_progress: OnProgress | None = None
) -> Swept:
    """Takes failed jobs off the list for good; without a condition, it empties the poison queue."""
    swept = Swept()
    records = RecordLog(storage.files, "operator")
    began_at = storage.blobs.clock.now()
    is_left = True
    while is_left:  # a job that has failed in two messages is found by one at a time
        is_left = False
        async for batch in in_batches(recorded(storage, selection)):
            earlier = [record for record in batch if record.at <= began_at]
            is_left |= bool(earlier)
            await _note(storage, records, earlier, "discarded")
            swept.done += len(earlier)
            if on_progress is not None:
                on_progress(swept.done)
    await _clean(storage, spares_others=selection != Selection())
    return swept


async def _note(
    storage: Storage,
    notes: RecordLog,
    records: Iterable[Record],
    outcome: Literal["replayed", "discarded"],
) -> None:
    """Notes what became of each failure; a later failure of the same job is another."""
    now = storage.blobs.clock.now()
    await notes.add(
        [
            Record(outcome=outcome, at=now, **each.model_dump(include=_NOTED))
            for each in records
        ]
    )


async def _clean(storage: Storage, *, spares_others: bool) -> None:
    """Deletes the poison queue's messages of jobs that are off the list.

    *spares_others*: messages that are no record of a failed job stay.
    """
    poison = storage.poison
    began_at = storage.blobs.clock.now()
    if not (waiting := (await poison.depth()).messages):
        return
    listed = {record.failure async for record in recorded(storage, Selection())}

    def stays(message: Message) -> bool:
        record = FailedJob.parse(message.body)
        if record is None:
            return spares_others
        return record.failure in listed or message.enqueued_at > began_at

    lease_seconds = min(
        LEASE_SECONDS + waiting * LEASE_SECONDS_PER_MESSAGE, MAX_LEASE_SECONDS
    )
    kept: dict[str, LeasedMessage] = {}
    try:
        while waiting > 0:  # not those that workers add meanwhile
            received = await poison.receive(MAX_RECEIVE, lease_seconds)
            fresh = [message for message in received if message.id not in kept]
            if not fresh:  # the first leases have expired, or others hold the rest
                break
            waiting -= len(fresh)
            gone = [message for message in fresh if not stays(message)]
            # Without the body: there may be a million.
            kept |= {each.id: replace(each, body="") for each in received}
            await _settle(poison.delete, gone)
            for message in gone:
                del kept[message.id]
    finally:
        try:
            await _settle(poison.release, kept.values())
        except TransientError as error:
            log.warning(
                f"failed jobs stay invisible until their leases expire: {error.message}",
                action="hand_back_failed",
            )


async def _settle(
    call: Callable[[LeasedMessage], Awaitable[None]],
    messages: Iterable[LeasedMessage],
) -> None:
    async def settle(message: LeasedMessage) -> None:
        # Lost: the lease expired and another sweep has the message, which will settle it.
        with contextlib.suppress(LeaseLost):
            await call(message)

    await concurrency.for_each(messages, settle, MAX_RECEIVE)

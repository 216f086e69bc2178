"""Reads campaigns' records: every shard once, in order, with flat memory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet import concurrency, errors
from imagefleet.job.message import RECORDS
from imagefleet.records import shard
from imagefleet.records.missing import MissingRecords
from imagefleet.records.record import Outcome, Record, hashed
from imagefleet.records.replaced import Replaced
from imagefleet.records.shard import NOTHING, Kind, ShardName, Totals
from imagefleet.storage.protocol import BlobPart, BlobRecord, BlobStore, Storage

#: Read at once; some 30,000 records.
_PART_BYTES = 4 * 2**20

#: Records in memory at once, some 10 MB.
_PARSED = 2_000

#: Shards whose start is read before it is their turn.
_READ_AHEAD = 8

#: Ends of shards read at the same time.
_CONCURRENT_READS = 16

#: A follower's records at once, about.
_POLLED = 20_000

#: The newest records are looked for in the ends of so many shards, those that grew last.
_NEWEST_SHARDS = 16

#: Of each: a worker adds 256 records at once, some 50 kB.
_END_BYTES = 128 * 2**10

OnDamaged = Callable[[str, str], None]
"""Called with the name of a shard, and what is wrong with it or with one of its records."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A campaign in numbers. *sent* is None where no filler has noted it."""

    sent: int | None
    images: int
    completed: int
    """Jobs of which every image is stored."""
    failed: int
    cancelled: int
    first_at: datetime | None
    """When the first process began to write records."""
    last_at: datetime | None
    """When the latest record was written."""
    discarded: int = 0
    """Failed jobs that an operator has discarded."""

    @property
    def pending(self) -> int | None:
        """Jobs that are queued or in flight."""
        if self.sent is None:
            return None
        ended = self.completed + self.failed + self.cancelled + self.discarded
        return max(0, self.sent - ended)


class _Sent(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True)

    load: str = Field(max_length=200)
    jobs: int = Field(ge=0, lt=2**53)


@dataclass(frozen=True, slots=True)
class _Shard:
    blob: BlobRecord
    campaign: str
    kind: Kind


def _ignore(_shard: str, _reason: str) -> None:
    """For callers who only want what is whole."""


async def campaigns(storage: Storage) -> AsyncIterator[str]:
    """The campaigns that have records, by name; one listing of folders."""
    async for name in storage.blobs.folders(RECORDS):
        if ShardName.read(f"{shard.folder(name)}-.jobs.jsonl.gz"):
            yield name


async def images(
    storage: Storage, campaign: str, on_damaged: OnDamaged = _ignore
) -> AsyncIterator[Record]:
    """Each stored image of a campaign once, in an order that stays the same.

    Reads every shard of images once: a listing, and a read for each 4 MiB.
    """
    shards = await _shards(storage.blobs, campaign)
    async with aclosing(_images(storage.blobs, shards, on_damaged)) as found:
        async for record in found:
            yield record


async def ended(
    storage: Storage, campaign: str | None = None, on_damaged: OnDamaged = _ignore
) -> AsyncIterator[Record]:
    """The jobs that have failed or were cancelled, except for those replayed or discarded since.

    None: of all campaigns. A job that failed again after a replay has a record of each time.
    """
    shards = _of_kind(await _shards(storage.blobs, campaign), "jobs")
    settled: set[int] = set()
    async for records in _records(storage.blobs, shards, on_damaged):
        settled.update(_failure(record) for record in records if _is_of_operator(record))
    # What is damaged was reported the first time.
    async with aclosing(_records(storage.blobs, shards, _ignore)) as parts:
        async for records in parts:
            for record in records:
                if not _is_of_operator(record) and (failure := _failure(record)) not in settled:
                    settled.add(failure)  # its message may have failed twice, after a crash
                    yield record


async def end(storage: Storage, campaign: str) -> dict[str, int]:
    """The position of a follower that has read all there is now; a listing."""
    return {each.blob.name: each.blob.size_bytes for each in await _shards(storage.blobs, campaign)}


async def sent(storage: Storage, campaign: str) -> int | None:
    """Its jobs, as far as fillers have noted them; a listing, and a read for each filler."""
    by_filler = await sent_by_filler(storage, campaign)
    return sum(by_filler.values()) if by_filler else None


async def sent_by_filler(storage: Storage, campaign: str) -> dict[str, int]:
    """As `sent`, for each of them, by what names it across its restarts."""
    shards = await _shards(storage.blobs, campaign)
    return await _sent(storage.blobs, _of_kind(shards, "sent"), _ignore)


async def newest(storage: Storage, campaign: str, most: int) -> list[Record]:
    """Some of the latest images and jobs, without reading the rest; the oldest of them first.

    A listing, and a read for each of the shards that grew last, 16 at most of each kind.
    """
    shards = await _shards(storage.blobs, campaign)
    shards.sort(key=lambda each: each.blob.modified_at or each.blob.created_at)
    ends = _of_kind(shards, "images")[-_NEWEST_SHARDS:] + _of_kind(shards, "jobs")[-_NEWEST_SHARDS:]
    found = await concurrency.gather(*(_end(storage.blobs, each, most) for each in ends))
    records = sorted((each for some in found for each in some), key=lambda each: each.at)
    return records[-most:]


async def _end(blobs: BlobStore, each: _Shard, most: int) -> list[Record]:
    """The records of the last members of a shard, *most* at most."""
    start = max(0, each.blob.size_bytes - _END_BYTES)
    part = await blobs.read_part(each.blob.name, start, _END_BYTES)
    if part is None:
        return []
    data = part.data[shard.first_member(part.data) :] if start else part.data
    lines = await asyncio.to_thread(shard.Decoder().lines, data)
    return await asyncio.to_thread(_parsed, lines[-most:], each, _ignore)


async def counts(storage: Storage, campaign: str, on_damaged: OnDamaged = _ignore) -> Counts:
    """A campaign's numbers, mostly from the ends of its shards.

    A listing, a small read for each shard of images, and all shards of other kinds. Where images'
    names were taken, or images were replaced, which is rare, all shards are read.
    """
    blobs = storage.blobs
    shards = await _shards(blobs, campaign)
    if _of_kind(shards, "again") or _of_kind(shards, "replaced"):
        stored = NOTHING
        completed = await _completed_again(blobs, _of_kind(shards, "again"))
        async for record in _images(blobs, shards, on_damaged):
            is_complete = record.completes_job or hashed(record.blob or "") in completed
            stored = Totals(stored.records + 1, stored.jobs + is_complete)
    else:
        stored = await _totals(blobs, _of_kind(shards, "images"), on_damaged)
    others = await _count_ended(blobs, _of_kind(shards, "jobs"), on_damaged)
    changed = [each.blob.modified_at or each.blob.created_at for each in shards]
    by_filler = await _sent(blobs, _of_kind(shards, "sent"), on_damaged)
    return Counts(
        sent=sum(by_filler.values()) if by_filler else None,
        images=stored.records,
        completed=stored.jobs,
        failed=others["failed"],
        cancelled=others["cancelled"],
        discarded=others["discarded"],
        first_at=min(map(_began_at, shards), default=None),
        last_at=max(changed, default=None),
    )


class Follower:
    """New records of one campaign, or of all, as they are written; at least once each.

    An image whose name was taken comes again, from the worker that found it taken. `position` is
    what has been read, as JSON; it goes on from there.
    """

    def __init__(
        self,
        storage: Storage,
        campaign: str | None = None,
        position: dict[str, int] | None = None,
        on_damaged: OnDamaged = _ignore,
        *,
        most: int | None = None,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        """A poll returns some *most* records, and reads a shard by *part_bytes*."""
        self.position: dict[str, int] = dict(position or {})
        self._blobs = storage.blobs
        self._campaign = campaign
        self._on_damaged = on_damaged
        self._most = most or _POLLED
        self._part_bytes = part_bytes
        self._given_up: set[str] = set()

    async def poll(self) -> list[Record]:
        """The next new records; [] if there are none.

        A listing, and a read for each shard that has grown.
        """
        found: list[Record] = []
        before = dict(self.position)
        try:
            for each in await _shards(self._blobs, self._campaign):
                name, size = each.blob.name, each.blob.size_bytes
                if each.kind in {"sent", "replaced"} or name in self._given_up:
                    continue
                if size <= (offset := self.position.get(name, 0)):
                    continue
                if len(found) >= self._most:
                    break
                found += await self._read(each, offset)
        except BaseException:  # what was read is not handed over, so it is read again
            self.position = before
            raise
        return found

    async def _read(self, each: _Shard, offset: int) -> list[Record]:
        name, found = each.blob.name, list[Record]()
        decoder = shard.Decoder(offset)
        async for lines in _lines(
            self._blobs, each, decoder, self._on_damaged, part_bytes=self._part_bytes
        ):
            found += await asyncio.to_thread(_parsed, lines, each, self._on_damaged)
            if len(found) >= self._most:
                break
        if decoder.is_damaged and decoder.position == offset > 0:
            return await self._read(each, 0)  # `end` may see a local file during an append
        if decoder.is_damaged:
            self._given_up.add(name)
        self.position[name] = decoder.position
        return found


async def _shards(blobs: BlobStore, campaign: str | None) -> list[_Shard]:
    prefix = RECORDS if campaign is None else shard.folder(campaign)
    found = [
        _Shard(blob, *name)
        async for blob in blobs.records(prefix)
        if (name := ShardName.read(blob.name))
    ]
    return sorted(found, key=lambda each: each.blob.name)


def _of_kind(shards: Iterable[_Shard], kind: Kind) -> list[_Shard]:
    return [each for each in shards if each.kind == kind]


def _began_at(each: _Shard) -> datetime:
    """From its name: a local file tells only when it was last written."""
    start = each.blob.name.rpartition("/")[2][:16]
    try:
        return datetime.strptime(start, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return each.blob.created_at


async def _starts(
    blobs: BlobStore, shards: Iterable[_Shard]
) -> AsyncGenerator[tuple[_Shard, BlobPart | None]]:
    """The first part of each shard, in order; those of the next shards are read meanwhile."""
    rest = iter(shards)
    ahead: deque[tuple[_Shard, asyncio.Future[BlobPart | None]]] = deque()
    try:
        while True:
            for each in islice(rest, _READ_AHEAD - len(ahead)):
                part = blobs.read_part(each.blob.name, 0, _PART_BYTES)
                ahead.append((each, asyncio.ensure_future(part)))
            if not ahead:
                return
            each, reading = ahead[0]
            yield each, await reading
            ahead.popleft()
    finally:
        for _, reading in ahead:
            if not reading.cancel() and not reading.cancelled():
                reading.exception()  # nobody else will ask for it
        # asyncio.run() ends all tasks, and then closes all generators at the same time: one that
        # waits there breaks those that wait for it.
        if any(not reading.done() for _, reading in ahead):
            await asyncio.gather(*(reading for _, reading in ahead), return_exceptions=True)


async def _lines(
    blobs: BlobStore,
    each: _Shard,
    decoder: shard.Decoder,
    on_damaged: OnDamaged,
    part: BlobPart | None = None,
    part_bytes: int = _PART_BYTES,
) -> AsyncGenerator[list[bytes]]:
    """A shard's lines from the decoder's position on, part by part, up to where it is damaged.

    *part* is the first one, if it has been read already.
    """
    name, offset = each.blob.name, decoder.position
    part = part or await blobs.read_part(name, offset, part_bytes)
    while part and part.data:
        offset += len(part.data)
        yield await asyncio.to_thread(decoder.lines, part.data)
        if decoder.is_damaged:
            on_damaged(name, "the shard is damaged: it is not one of JSON lines in gzip members")
            break
        if offset >= part.total_bytes:
            break
        part = await blobs.read_part(name, offset, part_bytes)


async def _images(
    blobs: BlobStore, shards: Collection[_Shard], on_damaged: OnDamaged
) -> AsyncGenerator[Record]:
    replaced = Replaced()
    async for notes in _records(blobs, _of_kind(shards, "replaced"), on_damaged):
        replaced.add(notes)
    again = _of_kind(shards, "again")
    missing = MissingRecords()
    async for part in _records(blobs, again, on_damaged):
        records = replaced.without(part, once=False)
        missing.add(record.blob for record in records if record.blob)
    async with aclosing(_records(blobs, _of_kind(shards, "images"), on_damaged)) as parts:
        async for part in parts:
            records = replaced.without(part, once=True)
            missing.found(record.blob for record in records if record.blob)
            for record in records:
                yield record
    # A worker that died in between has stored these images, and written no record.
    if missing.any:
        async with aclosing(_records(blobs, again, _ignore)) as parts:
            async for part in parts:
                for record in replaced.without(part, once=False):
                    if record.blob and missing.take(record.blob):
                        yield record


async def _records(
    blobs: BlobStore, shards: Iterable[_Shard], on_damaged: OnDamaged
) -> AsyncGenerator[list[Record]]:
    async with aclosing(_starts(blobs, shards)) as starts:
        async for each, part in starts:
            async with aclosing(_lines(blobs, each, shard.Decoder(), on_damaged, part)) as parts:
                async for lines in parts:
                    # Some at a time: they take ten times the memory of their lines.
                    for first in range(0, len(lines), _PARSED):
                        some = lines[first : first + _PARSED]
                        yield await asyncio.to_thread(_parsed, some, each, on_damaged)


def _parsed(lines: Iterable[bytes], each: _Shard, on_damaged: OnDamaged) -> list[Record]:
    """The records of a shard's lines; those of another campaign or kind are not valid there."""
    records = []
    are_images = each.kind in {"images", "again"}
    for line in lines:
        try:
            record = Record.read(line)
        except errors.JobError as error:
            on_damaged(each.blob.name, error.message)
            continue
        is_image = record.outcome == "completed" and record.blob is not None
        if record.campaign != each.campaign or is_image != are_images:
            on_damaged(each.blob.name, "a record that does not belong there")
        else:
            records.append(record)
    return records


async def _totals(blobs: BlobStore, shards: Collection[_Shard], on_damaged: OnDamaged) -> Totals:
    records = jobs = 0

    async def add(each: _Shard) -> None:
        nonlocal records, jobs
        start = max(0, each.blob.size_bytes - shard.TOTALS_BYTES)
        end = await blobs.read_part(each.blob.name, start, shard.TOTALS_BYTES)
        totals = shard.totals(end.data) if end else NOTHING
        if totals is None:  # it has grown since, or lost its end in a power failure
            totals = await _counted(blobs, each, on_damaged)
        records += totals.records
        jobs += totals.jobs

    await concurrency.for_each(shards, add, _CONCURRENT_READS)
    return Totals(records, jobs)


async def _counted(blobs: BlobStore, each: _Shard, on_damaged: OnDamaged) -> Totals:
    found = NOTHING
    async for records in _records(blobs, [each], on_damaged):
        jobs = sum(record.completes_job for record in records)
        found = Totals(found.records + len(records), found.jobs + jobs)
    return found


async def _completed_again(blobs: BlobStore, shards: Collection[_Shard]) -> set[int]:
    """Last images of jobs that another worker than the one that stored them has completed."""
    return {
        hashed(record.blob or "")
        async for records in _records(blobs, shards, _ignore)
        for record in records
        if record.completes
    }


async def _count_ended(
    blobs: BlobStore, shards: Iterable[_Shard], on_damaged: OnDamaged
) -> Counter[Outcome]:
    """How many jobs have failed or were cancelled, as `ended` has them, or were discarded."""
    ends: dict[int, Outcome] = {}
    replayed: set[int] = set()
    discarded: set[int] = set()
    async for records in _records(blobs, shards, on_damaged):
        for record in records:
            failure = _failure(record)
            if record.outcome == "replayed":
                replayed.add(failure)
            elif record.outcome == "discarded":
                discarded.add(failure)
            else:
                ends.setdefault(failure, record.outcome)
    for settled in replayed | discarded:
        ends.pop(settled, None)
    counted = Counter(ends.values())
    counted["discarded"] = len(discarded)
    return counted


async def _sent(
    blobs: BlobStore, shards: Collection[_Shard], on_damaged: OnDamaged
) -> dict[str, int]:
    """The jobs sent by each filler."""
    latest: dict[str, int] = {}
    async for each, part in _starts(blobs, shards):
        async for lines in _lines(blobs, each, shard.Decoder(), on_damaged, part):
            for line in lines:
                try:
                    note = _Sent.model_validate(json.loads(line))
                except (ValidationError, ValueError, RecursionError):
                    on_damaged(each.blob.name, "a count of jobs that is not valid")
                else:
                    latest[note.load] = max(note.jobs, latest.get(note.load, 0))
    return latest


def _is_of_operator(record: Record) -> bool:
    return record.outcome in {"replayed", "discarded"}


def _failure(record: Record) -> int:
    """Identifies one end of one message."""
    return hashed(record.source or record.key)

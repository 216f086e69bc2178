"""Shards of campaigns' records in the storage: which there are, and what is in them."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from imagefleet import errors
from imagefleet.job.message import RECORDS
from imagefleet.records.record import (
    GZIP,
    MAX_MEMBER_BYTES,
    NOTHING,
    OPERATORS,
    TOTALS_BYTES,
    Kind,
    Outcome,
    Record,
    ShardName,
    Totals,
    first_member,
    shard_folder,
    totals_at,
)
from imagefleet.redaction import printable
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart, BlobRecord, BlobStore

#: Bytes read at once, of some 30,000 records; and records in memory at once, some 10 MB.
PART_BYTES = 4 * 2**20
_PARSED = 2_000

#: Shards whose start is read before it is their turn, and ends that are read at the same time.
_READ_AHEAD = 8
CONCURRENT_READS = 16

_Result = TypeVar("_Result")

#: Bytes that are read of the end of a shard: a worker adds 256 records at once, some 50 kB.
_END_BYTES = 128 * 2**10

#: The fewest bytes of a compressed record; totals that say more records than that are not believed.
_LEAST_RECORD_BYTES = 4
#: Those of most, about.
_RECORD_BYTES = 100

#: To hand so few lines to a thread takes as long as to read them: most of many campaigns have few.
_FEW_LINES = 20

#: What the records of each kind say.
_OUTCOMES: Mapping[Kind, Collection[Outcome]] = {
    "images": {"completed"},
    "again": {"completed"},
    "jobs": {"failed", "cancelled"},
    "settled": {"replayed", "discarded"},
    "replaced": {"replaced"},
}

#: A name that a worker gives an image: that of its job, a number, a stage, and its format.
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,199}")

_DAMAGED = "the shard is damaged: it is not one of JSON lines in gzip members"

#: Reasons that are kept, and those of them that a warning names.
_KEPT_REASONS = 10
_SHOWN_REASONS = 3


@dataclass(slots=True)
class ShardDecoder:
    """Reads a shard from its parts; `position` is the end of the last whole member."""

    position: int = 0
    is_damaged: bool = False
    _member: zlib._Decompress | None = None
    _member_bytes: int = 0
    _text: bytes = b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines of the members that *data*, the next bytes, completes; or sets `is_damaged`."""
        found: list[bytes] = []
        while data and not self.is_damaged:
            if self._member is None:
                self._member, self._member_bytes, self._text = zlib.decompressobj(GZIP), 0, b""
            try:
                self._text += self._member.decompress(data, MAX_MEMBER_BYTES + 1)
            except zlib.error:
                self.is_damaged = True
                break
            self.is_damaged = len(self._text) > MAX_MEMBER_BYTES
            self._member_bytes += len(data) - len(self._member.unused_data)
            data = self._member.unused_data
            if self._member.eof:
                self._member = None
                self.position += self._member_bytes
                found += self._text.removesuffix(b"\n").split(b"\n") if self._text else []
        return found


@dataclass(slots=True)
class Damaged:
    """What every reader of records counts: records that do not fit, and shards that are none.

    They cannot be read, say what their writer may not say, or not what is stored.
    """

    count: int = 0
    shards: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    saw_images: bool = False
    """Whether it was asked which images are stored, so that more than records decided."""

    def add(self, shard: str, reason: str) -> None:
        self.count += 1
        self.shards.add(shard)
        if len(self.reasons) < _KEPT_REASONS:
            self.reasons.append(printable(f"{shard[:200]}: {reason[:300]}"))

    def include(self, others: Damaged) -> None:
        self.count += others.count
        self.shards |= others.shards
        self.saw_images |= others.saw_images
        self.reasons += others.reasons[: _KEPT_REASONS - len(self.reasons)]

    def __str__(self) -> str:
        shown = self.reasons[:_SHOWN_REASONS]
        more = self.count - len(shown)
        which = "1 record does" if self.count == 1 else f"{self.count:,} records do"
        return f"{which} not fit: {'; '.join(shown)}{f'; and {more:,} more' if more else ''}"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard as listed, what its name says, and the store that it lies in."""

    blob: BlobRecord
    campaign: str
    kind: Kind
    store: BlobStore
    is_cancelled: bool = False
    """Whether the operator has cancelled its campaign."""


async def shards_of(
    storage: Storage, campaign: str | None, damaged: Damaged | None = None
) -> list[StoredShard]:
    """A campaign's shards, or all; two listings. The operator's count among the files alone."""
    prefix = RECORDS if campaign is None else shard_folder(campaign)
    found: list[StoredShard] = []
    # The images' first: a campaign is cancelled before a worker writes that a job was.
    for store, are_operators in ((storage.blobs, False), (storage.files, True)):
        async for blob in store.records(prefix):
            name = ShardName.read(blob.name)
            if name and (name.kind in OPERATORS) == are_operators:
                found.append(StoredShard(blob, *name, store))
            elif name and damaged:
                damaged.add(blob.name, "a shard that only the operator writes, among the files")
    cancelled = {shard.campaign for shard in found if shard.kind == "cancelled"}
    return sorted(
        (
            replace(shard, is_cancelled=True) if shard.campaign in cancelled else shard
            for shard in found
        ),
        key=lambda shard: shard.blob.name,
    )


def image_name(blob: str, campaign: str) -> str | None:
    """An image's name in its campaign's folder; None for one that leads out of it, or is none."""
    folder, _, name = blob.partition("/")
    return name if folder == campaign and _IMAGE_NAME.fullmatch(name) else None


async def totals(shard: StoredShard) -> Totals | None:
    """What the end of a shard says of it; None if it says nothing, or more than there can be."""
    start = max(0, shard.blob.size_bytes - TOTALS_BYTES)
    end = await shard.store.read_part(shard.blob.name, start, TOTALS_BYTES)
    found = totals_at(end.data) if end else NOTHING
    return found if found and found.records <= start // _LEAST_RECORD_BYTES else None


def of_kind(shards: Iterable[StoredShard], kind: Kind) -> list[StoredShard]:
    return [each for each in shards if each.kind == kind]


def began_at(each: StoredShard) -> datetime:
    """When it was created; by its name if it is a local file, which tells only its last change."""
    if each.blob.modified_at is not None:
        return each.blob.created_at
    start = each.blob.name.rpartition("/")[2][:16]
    try:
        return datetime.strptime(start, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return each.blob.created_at


async def _starts(
    shards: Iterable[StoredShard],
) -> AsyncGenerator[tuple[StoredShard, BlobPart | None]]:
    """The first part of each shard, in order; those of the next shards are read meanwhile."""
    rest = iter(shards)
    ahead: deque[tuple[StoredShard, asyncio.Future[BlobPart | None]]] = deque()
    try:
        while True:
            for item in islice(rest, _READ_AHEAD - len(ahead)):
                part = item.store.read_part(item.blob.name, 0, PART_BYTES)
                ahead.append((item, asyncio.ensure_future(part)))
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


async def lines(
    each: StoredShard,
    decoder: ShardDecoder,
    damaged: Damaged,
    part: BlobPart | None = None,
    part_bytes: int = PART_BYTES,
) -> AsyncGenerator[list[bytes]]:
    """A shard's lines from the decoder's position on; *part*, if it was read, is the first."""
    blobs, name, offset = each.store, each.blob.name, decoder.position
    part = part or await blobs.read_part(name, offset, part_bytes)
    while part and part.data:
        offset += len(part.data)
        yield await computed(len(part.data) // _RECORD_BYTES, decoder.lines, part.data)
        if decoder.is_damaged:
            damaged.add(name, _DAMAGED)
            break
        if offset >= part.total_bytes:
            break
        part = await blobs.read_part(name, offset, part_bytes)


async def lines_of_all(
    shards: Iterable[StoredShard], damaged: Damaged
) -> AsyncGenerator[tuple[StoredShard, list[bytes]]]:
    async with aclosing(_starts(shards)) as starts:
        async for start, part in starts:
            async with aclosing(lines(start, ShardDecoder(), damaged, part)) as parts:
                async for some in parts:
                    yield start, some


async def computed(lines: int, function: Callable[..., _Result], *args: Any) -> _Result:
    """What *function* returns; on a thread, if there are *lines* enough to be worth one."""
    return await asyncio.to_thread(function, *args) if lines > _FEW_LINES else function(*args)


async def records(shards: Iterable[StoredShard], damaged: Damaged) -> AsyncGenerator[list[Record]]:
    """The records of each shard, some at a time: they take ten times the memory of their lines."""
    async with aclosing(lines_of_all(shards, damaged)) as parts:
        async for shard, found in parts:
            async for some in records_in(shard, found, damaged):
                yield some


async def records_in(
    shard: StoredShard, lines: Sequence[bytes], damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    """The records of a shard's *lines*, some at a time."""
    for first in range(0, len(lines), _PARSED):
        some = lines[first : first + _PARSED]
        yield await computed(len(some), parsed, some, shard, damaged)


def size_bytes(shards: Iterable[StoredShard]) -> int:
    return sum(shard.blob.size_bytes for shard in shards)


def parsed(found: Iterable[bytes], each: StoredShard, damaged: Damaged) -> list[Record]:
    """The records of a shard's lines; those of another campaign or kind are not valid there."""
    valid = []
    for line in found:
        try:
            record = Record.read(line)
        except errors.JobError as error:
            damaged.add(each.blob.name, error.message)
            continue
        if why := _misfit(record, each):
            damaged.add(each.blob.name, why)
        else:
            valid.append(record)
    return valid


def _misfit(record: Record, shard: StoredShard) -> str | None:
    """Why a record does not belong into its shard; None if it does."""
    is_named = record.blob is not None or shard.kind not in {"images", "again"}
    if (
        record.campaign != shard.campaign
        or record.outcome not in _OUTCOMES.get(shard.kind, ())
        or not is_named
    ):
        return "a record that does not belong there"
    if record.index >= record.images:
        return "a record of an image that its job does not have"
    if record.outcome == "completed" and image_name(record.blob or "", shard.campaign) is None:
        return "a record of what is no image of this campaign"
    if record.outcome == "completed" and not record.has_own_name:
        return "a record of an image by another job's name"
    if record.outcome == "cancelled" and not shard.is_cancelled:
        return "a record of a cancelled job, though nobody has cancelled the campaign"
    return None


async def last_lines(each: StoredShard, damaged: Damaged) -> list[bytes]:
    start = max(0, each.blob.size_bytes - _END_BYTES)
    part = await each.store.read_part(each.blob.name, start, _END_BYTES)
    if part is None:
        return []
    decoder = ShardDecoder()
    data = part.data[first_member(part.data) :] if start else part.data
    found = await asyncio.to_thread(decoder.lines, data)
    if decoder.is_damaged:
        damaged.add(each.blob.name, _DAMAGED)
    return found

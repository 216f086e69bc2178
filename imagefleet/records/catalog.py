"""Shards of campaigns' records in the storage: which there are, and what is in them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from cachetools import LRUCache

from imagefleet import concurrency
from imagefleet.errors import JobError, SetupError
from imagefleet.files import pack
from imagefleet.job.message import RECORDS
from imagefleet.records.log import (
    GZIP,
    KINDS,
    MAX_MEMBER_BYTES,
    OPERATORS,
    TOTALS_BYTES,
    ShardKind,
    ShardName,
    Totals,
    shard_folder,
    shard_part,
    totals_at,
)
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobPart, BlobRecord, BlobStore

#: Bytes read at once, of some 30,000 records; and records in memory at once, some 10 MB.
PART_BYTES = 4 * 2**20
_PARSED = 2_000

#: Shards whose starts, and those whose ends, are read at the same time: of long ones a few.
_READ_TOGETHER = 64
_BYTES_TOGETHER = 8 * PART_BYTES
CONCURRENT_READS = 16

#: Fewer bytes are no whole member: whoever stores images may store many such.
LEAST_SHARD_BYTES = len(shard_part((), Totals()))

#: A shard's address, size in bytes, and time of its last change.
_State = tuple[str, int, datetime | None]

#: Shards that were found to hold nothing, which are not read again while they are as they were.
_EMPTY = LRUCache[_State, None](100_000)

#: The fewest bytes of a compressed record; totals that say more records than that are not believed.
_LEAST_RECORD_BYTES = 4

#: A name that a worker gives an image: that of its job, a number, a stage, and its format.
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,199}")

#: Bytes that were read of shards, by their names.
Positions = dict[str, int]

#: Records some at a time.
RecordParts = AsyncGenerator[list[Record]]

_DAMAGED = "the shard is damaged: it is not one of JSON lines in gzip members"

#: Reasons that are kept, and those of them that a warning names.
_KEPT_REASONS = 10
_SHOWN_REASONS = 3


@dataclass
class ShardDecoder:
    """Reads a shard from its parts; `position` is the end of the last whole member."""

    position: int = 0
    is_damaged: bool = False
    _member: zlib._Decompress | None = None
    _member_bytes: int = 0
    _text: bytes = b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines of the members that *data*, the next bytes, completes; or sets `is_damaged`."""
        found = []
        while data and not self.is_damaged:
            if self._member is None:
                self._member = zlib.decompressobj(GZIP)
                self._member_bytes = 0
                self._text = b""
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
                found += (
                    self._text.removesuffix(b"\n").split(b"\n") if self._text else []
                )
        return found


@dataclass
class Damaged:
    """Counts records that were left out, and shards that are none, with the first reasons.

    They cannot be read, say what their writer may not say, or not what is stored.
    """

    count: int = 0
    shards: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    #: Stored images were looked up, so that more than records decided.
    saw_images: bool = False

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


class StoredShard(NamedTuple):
    """A shard as listed, what its name says, and the store that it lies in."""

    blob: BlobRecord
    campaign: str
    kind: ShardKind
    store: BlobStore
    #: The operator has cancelled its campaign.
    is_cancelled: bool = False
    #: Some of its campaign's images are in packs, or nobody may tell.
    has_packs: bool = False


#: Shards with lines of theirs.
ShardLines = AsyncGenerator[tuple[StoredShard, list[bytes]]]


async def packed_campaigns(storage: Storage) -> set[str] | None:
    """The campaigns with images in packs; None for credentials that may not list them."""
    with contextlib.suppress(SetupError):
        return {name async for name in storage.packs.folders("")}
    return None


def may_have_packs(campaign: str, packed: set[str] | None) -> bool:
    return packed is None or campaign in packed


async def shards_of(
    storage: Storage,
    campaign: str | None,
    damaged: Damaged | None = None,
    *,
    packs: bool = True,
) -> list[StoredShard]:
    """A campaign's shards, or all; two listings. The operator's count among the files alone.

    *packs*: `has_packs` is told, by one listing more.
    """
    packed = await packed_campaigns(storage) if packs else set[str]()
    prefix = RECORDS if campaign is None else shard_folder(campaign)
    found = []
    # The images' first: a campaign is cancelled before a worker writes that a job was.
    for store, are_operators in ((storage.blobs, False), (storage.files, True)):
        async for blob in store.records(prefix):
            name = ShardName.read(blob.name)
            if name and (name.kind in OPERATORS) == are_operators:
                found.append(StoredShard(blob, *name, store))
            elif name and damaged:
                damaged.add(
                    blob.name, "a shard that only the operator writes, among the files"
                )
    cancelled = {shard.campaign for shard in found if shard.kind == "cancelled"}
    return [
        shard._replace(
            is_cancelled=shard.campaign in cancelled,
            has_packs=may_have_packs(shard.campaign, packed),
        )
        for shard in sorted(found, key=lambda shard: shard.blob.name)
    ]


def image_name(blob: str, campaign: str) -> str | None:
    """An image's name in its campaign's folder; None for one that leads out of it, or is none."""
    folder, _, name = blob.partition("/")
    return name if folder == campaign and _IMAGE_NAME.fullmatch(name) else None


def _is_readable(shard: StoredShard, damaged: Damaged) -> bool:
    """False for a shard that holds no record, which *damaged* counts unless it has just begun."""
    size = shard.blob.size_bytes
    if size >= LEAST_SHARD_BYTES and _state(shard) not in _EMPTY:
        return True
    if size:
        damaged.add(shard.blob.name, _DAMAGED)
    return False


def _state(shard: StoredShard) -> _State:
    blob = shard.blob
    return shard.store.address(blob.name), blob.size_bytes, blob.modified_at


async def totals(shard: StoredShard, damaged: Damaged) -> Totals:
    """The totals at a shard's end; counts its records if there are none, or more than it can hold.

    It has grown since, or lost its end in a power failure, or says more than it can hold.
    """
    if not _is_readable(shard, damaged):
        return Totals()
    start = max(0, shard.blob.size_bytes - TOTALS_BYTES)
    end = await shard.store.read_part(shard.blob.name, start, TOTALS_BYTES)
    found = totals_at(end.data) if end else Totals()
    if found is None or found.records > start // _LEAST_RECORD_BYTES:
        found = Totals()
        async for some in records([shard], damaged):
            jobs = sum(record.completes_job for record in some)
            found = Totals(found.records + len(some), found.jobs + jobs)
    return found


def of_kind(shards: Iterable[StoredShard], *kinds: ShardKind) -> list[StoredShard]:
    return [shard for shard in shards if shard.kind in kinds]


def began_at(each: StoredShard) -> datetime:
    """Creation time of a shard; by its name if it is a local file, which tells its last change."""
    if each.blob.modified_at is None:
        start = each.blob.name.rpartition("/")[2][:16]
        with contextlib.suppress(ValueError):
            return datetime.strptime(start, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return each.blob.created_at


async def lines(
    each: StoredShard,
    decoder: ShardDecoder,
    damaged: Damaged,
    part: BlobPart | None = None,
    part_bytes: int = PART_BYTES,
) -> AsyncGenerator[list[bytes]]:
    """A shard's lines from the decoder's position on; *part*, if it was read, is the first."""
    blobs = each.store
    name = each.blob.name
    offset = decoder.position
    part = part or await blobs.read_part(name, offset, part_bytes)
    while part and part.data:
        offset += len(part.data)
        yield await asyncio.to_thread(decoder.lines, part.data)
        if decoder.is_damaged:
            damaged.add(name, _DAMAGED)
            break
        if offset >= part.total_bytes:
            break
        part = await blobs.read_part(name, offset, part_bytes)


async def lines_of_all(shards: Iterable[StoredShard], damaged: Damaged) -> ShardLines:
    """The lines of each shard, in order; the first parts of some shards are read together."""
    rest = deque(each for each in shards if _is_readable(each, damaged))
    while some := list(_together(rest)):
        reads = (each.store.read_part(each.blob.name, 0, PART_BYTES) for each in some)
        for each, start in zip(some, await concurrency.gather(*reads), strict=True):
            decoder = ShardDecoder()
            async for found in lines(each, decoder, damaged, start):
                yield each, found
            if not decoder.position and start and start.data:
                _EMPTY[_state(each)] = None
                if not decoder.is_damaged:  # the beginning of a member
                    damaged.add(each.blob.name, _DAMAGED)


def _together(rest: deque[StoredShard]) -> Iterator[StoredShard]:
    """Takes the shards whose starts are read at the same time."""
    size = 0
    for _ in range(_READ_TOGETHER):
        if not rest or size >= _BYTES_TOGETHER:
            return
        size += min(PART_BYTES, rest[0].blob.size_bytes)
        yield rest.popleft()


async def records(shards: Iterable[StoredShard], damaged: Damaged) -> RecordParts:
    """The records of each shard, some at a time: they take ten times the memory of their lines."""
    async for shard, found in lines_of_all(shards, damaged):
        async for some in records_in(shard, found, damaged):
            yield some


async def records_among(
    shards: Iterable[StoredShard], choose: Callable[[list[bytes]], list[bytes]]
) -> RecordParts:
    """The records of the lines that *choose* returns of some."""
    async for shard, found in lines_of_all(shards, Damaged()):
        some = await asyncio.to_thread(choose, found)
        yield parsed(some, shard, Damaged())


def records_of(
    shards: Iterable[StoredShard], kind: ShardKind, damaged: Damaged
) -> RecordParts:
    return records(of_kind(shards, kind), damaged)


async def records_in(
    shard: StoredShard, lines: Sequence[bytes], damaged: Damaged
) -> RecordParts:
    for first in range(0, len(lines), _PARSED):
        some = lines[first : first + _PARSED]
        yield await asyncio.to_thread(parsed, some, shard, damaged)


def size_bytes(shards: Iterable[StoredShard]) -> int:
    return sum(shard.blob.size_bytes for shard in shards)


def parsed(found: Iterable[bytes], each: StoredShard, damaged: Damaged) -> list[Record]:
    """The records of a shard's lines; those of another campaign or kind are not valid there."""
    valid = []
    for line in found:
        try:
            record = Record.read(line)
        except JobError as error:
            damaged.add(each.blob.name, error.message)
            continue
        if why := _misfit(record, each):
            damaged.add(each.blob.name, why)
        else:
            valid.append(record)
    return valid


def _misfit(record: Record, shard: StoredShard) -> str | None:
    kind = "images" if shard.kind == "again" else shard.kind
    is_named = record.blob is not None or kind != "images"
    if (
        record.campaign != shard.campaign
        or KINDS[record.outcome] != kind
        or not is_named
    ):
        return "a record that does not belong there"
    if record.index >= record.images:
        return "a record of an image that its job does not have"
    is_inside = image_name(record.blob or "", shard.campaign) is not None
    if record.pack is not None:
        is_inside &= pack.campaign_of(record.pack) == shard.campaign
        is_inside &= None not in (record.offset, record.size_bytes, record.sha256)
    if record.outcome == "completed" and not is_inside:
        return "a record of what is no image of this campaign"
    if record.outcome == "completed" and not record.has_own_name:
        return "a record of an image by another job's name"
    if record.outcome == "cancelled" and not shard.is_cancelled:
        return "a record of a cancelled job, though nobody has cancelled the campaign"
    return None

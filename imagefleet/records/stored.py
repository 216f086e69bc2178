"""Shards of campaigns' records in the storage: which there are, and what is in them."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice

from imagefleet import errors
from imagefleet.job.message import RECORDS
from imagefleet.records.record import (
    GZIP,
    MAX_MEMBER_BYTES,
    NOTHING,
    TOTALS_BYTES,
    Kind,
    Record,
    ShardName,
    Totals,
    first_member,
    shard_folder,
    totals_at,
)
from imagefleet.redaction import printable
from imagefleet.storage.protocol import BlobPart, BlobRecord, BlobStore

#: Bytes read at once, of some 30,000 records; and records in memory at once, some 10 MB.
PART_BYTES = 4 * 2**20
_PARSED = 2_000

#: Shards whose start is read before it is their turn, and ends that are read at the same time.
_READ_AHEAD = 8
CONCURRENT_READS = 16

#: Bytes that are read of the end of a shard: a worker adds 256 records at once, some 50 kB.
_END_BYTES = 128 * 2**10

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
    """What every reader of records counts: records and shards that cannot be read."""

    count: int = 0
    shards: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def add(self, shard: str, reason: str) -> None:
        self.count += 1
        self.shards.add(shard)
        if len(self.reasons) < _KEPT_REASONS:
            self.reasons.append(printable(f"{shard[:200]}: {reason[:300]}"))

    def __str__(self) -> str:
        shown = self.reasons[:_SHOWN_REASONS]
        more = self.count - len(shown)
        return (
            f"damaged records are left out: {'; '.join(shown)}"
            f"{f'; and {more:,} more' if more else ''}"
        )


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard as listed, and what its name says."""

    blob: BlobRecord
    campaign: str
    kind: Kind


async def shards_of(blobs: BlobStore, campaign: str | None) -> list[StoredShard]:
    prefix = RECORDS if campaign is None else shard_folder(campaign)
    found = [
        StoredShard(blob, *name)
        async for blob in blobs.records(prefix)
        if (name := ShardName.read(blob.name))
    ]
    return sorted(found, key=lambda each: each.blob.name)


def image_name(blob: str, campaign: str) -> str | None:
    """An image's name in its campaign's folder; None for one that leads out of it, or is none."""
    folder, _, name = blob.partition("/")
    return name if folder == campaign and _IMAGE_NAME.fullmatch(name) else None


async def totals(blobs: BlobStore, shard: StoredShard) -> Totals | None:
    """What the end of a shard says of it; None if it says nothing."""
    start = max(0, shard.blob.size_bytes - TOTALS_BYTES)
    end = await blobs.read_part(shard.blob.name, start, TOTALS_BYTES)
    return totals_at(end.data) if end else NOTHING


def of_kind(shards: Iterable[StoredShard], kind: Kind) -> list[StoredShard]:
    return [each for each in shards if each.kind == kind]


def began_at(each: StoredShard) -> datetime:
    """Reads its start from its name: a local file tells only when it was last written."""
    start = each.blob.name.rpartition("/")[2][:16]
    try:
        return datetime.strptime(start, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return each.blob.created_at


async def _starts(
    blobs: BlobStore, shards: Iterable[StoredShard]
) -> AsyncGenerator[tuple[StoredShard, BlobPart | None]]:
    """The first part of each shard, in order; those of the next shards are read meanwhile."""
    rest = iter(shards)
    ahead: deque[tuple[StoredShard, asyncio.Future[BlobPart | None]]] = deque()
    try:
        while True:
            for item in islice(rest, _READ_AHEAD - len(ahead)):
                part = blobs.read_part(item.blob.name, 0, PART_BYTES)
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
    blobs: BlobStore,
    each: StoredShard,
    decoder: ShardDecoder,
    damaged: Damaged,
    part: BlobPart | None = None,
    part_bytes: int = PART_BYTES,
) -> AsyncGenerator[list[bytes]]:
    """A shard's lines from the decoder's position on; *part*, if it was read, is the first."""
    name, offset = each.blob.name, decoder.position
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


async def lines_of_all(
    blobs: BlobStore, shards: Iterable[StoredShard], damaged: Damaged
) -> AsyncGenerator[tuple[StoredShard, list[bytes]]]:
    async with aclosing(_starts(blobs, shards)) as starts:
        async for start, part in starts:
            async with aclosing(lines(blobs, start, ShardDecoder(), damaged, part)) as parts:
                async for some in parts:
                    yield start, some


async def records(
    blobs: BlobStore, shards: Iterable[StoredShard], damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    """The records of each shard, some at a time: they take ten times the memory of their lines."""
    async with aclosing(lines_of_all(blobs, shards, damaged)) as parts:
        async for part, found in parts:
            for first in range(0, len(found), _PARSED):
                some = found[first : first + _PARSED]
                yield await asyncio.to_thread(parsed, some, part, damaged)


def parsed(found: Iterable[bytes], each: StoredShard, damaged: Damaged) -> list[Record]:
    """The records of a shard's lines; those of another campaign or kind are not valid there."""
    valid = []
    are_images = each.kind in {"images", "again"}
    for line in found:
        try:
            record = Record.read(line)
        except errors.JobError as error:
            damaged.add(each.blob.name, error.message)
            continue
        is_image = record.outcome == "completed" and record.blob is not None
        if record.campaign != each.campaign or is_image != are_images:
            damaged.add(each.blob.name, "a record that does not belong there")
        elif are_images and image_name(record.blob or "", each.campaign) is None:
            damaged.add(each.blob.name, "a record of what is no image of this campaign")
        else:
            valid.append(record)
    return valid


async def last_lines(blobs: BlobStore, each: StoredShard, damaged: Damaged) -> list[bytes]:
    start = max(0, each.blob.size_bytes - _END_BYTES)
    part = await blobs.read_part(each.blob.name, start, _END_BYTES)
    if part is None:
        return []
    decoder = ShardDecoder()
    data = part.data[first_member(part.data) :] if start else part.data
    found = await asyncio.to_thread(decoder.lines, data)
    if decoder.is_damaged:
        damaged.add(each.blob.name, _DAMAGED)
    return found

"""Reads campaigns' records: every shard once, in order, with flat memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from imagefleet import concurrency, errors
from imagefleet.job.message import RECORDS
from imagefleet.records import sent as ledger
from imagefleet.records import stored
from imagefleet.records.once import MissingRecords, Replaced
from imagefleet.records.record import NOTHING, Outcome, Record, ShardName, Totals, hashed
from imagefleet.records.stored import Damaged, StoredShard
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobStore

#: A follower's records at once, about.
_POLLED = 20_000

#: Seconds between two polls, each of which is a listing and a read for each shard that has grown.
POLL_SECONDS = 5.0

#: Polls without a record after which a campaign without pending jobs has ended: its filler may
#: be slower than the workers. One that has not ended is counted again after twice as many: on Azure
#: that is a read of each shard.
_QUIET_POLLS = 3

#: The newest records are looked for in the ends of so many shards, those that grew last.
_NEWEST_SHARDS = 16

_BY_OPERATOR: Collection[Outcome] = ("replayed", "discarded")


@dataclass(frozen=True, slots=True)
class Counts:
    """A campaign in numbers. *sent* is None where nobody has noted it."""

    sent: int | None
    images: int
    completed: int
    """Jobs of which every image is stored."""
    failed: int
    cancelled: int
    first_at: datetime | None
    """The time at which the first process began to write records."""
    last_at: datetime | None
    discarded: int = 0

    @property
    def pending(self) -> int | None:
        """Jobs that are queued or in flight."""
        if self.sent is None:
            return None
        ended = self.completed + self.failed + self.cancelled + self.discarded
        return max(0, self.sent - ended)


async def campaigns(storage: Storage) -> AsyncIterator[str]:
    """The campaigns that have records or jobs that were sent, by name; two listings of folders."""
    found = {name async for name in storage.blobs.folders(RECORDS)}
    for name in sorted(found.union(await ledger.campaigns(storage))):
        if ShardName.read(f"{RECORDS}{name}/-.jobs.jsonl.gz"):
            yield name


def images(
    storage: Storage, campaign: str, damaged: Damaged | None = None
) -> AsyncIterator[Record]:
    """Each stored image of a campaign once; a listing, and a read for each 4 MiB of records."""
    return _singly(_images(storage, campaign, damaged or Damaged()))


def ended(
    storage: Storage, campaign: str | None = None, damaged: Damaged | None = None
) -> AsyncIterator[Record]:
    """The jobs that failed or were cancelled, and not replayed or discarded since; None: of all."""
    return _singly(_ended(storage, campaign, damaged or Damaged()))


async def _singly(parts: AsyncGenerator[list[Record]]) -> AsyncIterator[Record]:
    async with aclosing(parts):
        async for records in parts:
            for record in records:
                yield record


async def results(
    storage: Storage, campaign: str, outcomes: Collection[str], damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    """A campaign's images, and then its jobs that have failed or were cancelled, some at a time."""
    wanted = []
    if "completed" in outcomes:
        wanted.append(_images(storage, campaign, damaged))
    if set(outcomes) - {"completed"}:
        wanted.append(_ended(storage, campaign, damaged))
    for parts in wanted:
        async with aclosing(parts):
            async for records in parts:
                yield [record for record in records if record.outcome in outcomes]


async def end(storage: Storage, campaign: str) -> dict[str, int]:
    """The position of a follower that has read all there is now; a listing."""
    return {
        each.blob.name: each.blob.size_bytes
        for each in await stored.shards_of(storage.blobs, campaign)
    }


async def newest(storage: Storage, campaign: str, most: int) -> list[Record]:
    """The latest images and jobs, oldest first: a listing, and the ends of 32 shards at most."""
    shards = await stored.shards_of(storage.blobs, campaign)
    shards.sort(key=lambda each: each.blob.modified_at or each.blob.created_at)
    ends = (
        stored.of_kind(shards, "images")[-_NEWEST_SHARDS:]
        + stored.of_kind(shards, "jobs")[-_NEWEST_SHARDS:]
    )
    found = await concurrency.gather(*(_end(storage.blobs, each, most) for each in ends))
    records = sorted((each for some in found for each in some), key=lambda each: each.at)
    return records[-most:]


async def _end(blobs: BlobStore, each: StoredShard, most: int) -> list[Record]:
    lines = await stored.last_lines(blobs, each, Damaged())
    return await asyncio.to_thread(stored.parsed, lines[-most:], each, Damaged())


async def counts(storage: Storage, campaign: str, damaged: Damaged | None = None) -> Counts:
    """A campaign's numbers: a listing, and the ends of its shards of images; all of the other ones.

    Also the names of all images where some were taken, and all records where some were replaced.
    """
    blobs, damaged = storage.blobs, damaged or Damaged()
    shards = await stored.shards_of(blobs, campaign)
    drawn, again = stored.of_kind(shards, "images"), stored.of_kind(shards, "again")
    if stored.of_kind(shards, "replaced"):
        total = NOTHING
        _, completed = await _read_again(blobs, again, Damaged())
        async for record in images(storage, campaign, damaged):
            is_complete = record.completes_job or hashed(record.blob or "") in completed
            total = Totals(total.records + 1, total.jobs + is_complete)
    else:
        total = await _totals(blobs, drawn, damaged)
        if again:
            more = await _totals_again(blobs, drawn, again, damaged)
            total = Totals(total.records + more.records, total.jobs + more.jobs)
    others = await _count_ended(blobs, stored.of_kind(shards, "jobs"), damaged)
    changed = [each.blob.modified_at or each.blob.created_at for each in shards]
    return Counts(
        sent=await ledger.counts(storage, campaign),
        images=total.records,
        completed=total.jobs,
        failed=others["failed"],
        cancelled=others["cancelled"],
        discarded=others["discarded"],
        first_at=min(map(stored.began_at, shards), default=None),
        last_at=max(changed, default=None),
    )


class Follower:
    """New records of one or all campaigns, from *position* on; images drawn again come again."""

    def __init__(
        self,
        storage: Storage,
        campaign: str | None = None,
        position: dict[str, int] | None = None,
        damaged: Damaged | None = None,
        *,
        most: int | None = None,
        part_bytes: int = stored.PART_BYTES,
    ) -> None:
        """A poll returns some *most* records, and reads a shard by *part_bytes*."""
        self.position: dict[str, int] = dict(position or {})
        self._blobs = storage.blobs
        self._campaign = campaign
        self._damaged = damaged or Damaged()
        self._most = most or _POLLED
        self._part_bytes = part_bytes
        self._given_up: set[str] = set()

    async def poll(self) -> list[Record]:
        """The next new records, if any: a listing, and a read for each shard that has grown."""
        found: list[Record] = []
        before = dict(self.position)
        try:
            for shard in await stored.shards_of(self._blobs, self._campaign):
                name, size = shard.blob.name, shard.blob.size_bytes
                if shard.kind == "replaced" or name in self._given_up:
                    continue
                if size <= (offset := self.position.get(name, 0)):
                    continue
                if len(found) >= self._most:
                    break
                found += await self._read(shard, offset)
        except BaseException:  # what was read is not handed over, so it is read again
            self.position = before
            raise
        return found

    async def _read(self, each: StoredShard, offset: int) -> list[Record]:
        name, found = each.blob.name, list[Record]()
        decoder = stored.ShardDecoder(offset)
        async for lines in stored.lines(
            self._blobs, each, decoder, self._damaged, part_bytes=self._part_bytes
        ):
            found += await asyncio.to_thread(stored.parsed, lines, each, self._damaged)
            if len(found) >= self._most:
                break
        if decoder.is_damaged and decoder.position == offset > 0:
            return await self._read(each, 0)  # `end` may see a local file during an append
        if decoder.is_damaged:
            self._given_up.add(name)
        self.position[name] = decoder.position
        return found


async def follow(
    storage: Storage,
    follower: Follower,
    campaign: str,
    outcomes: Collection[str],
    on_retry: Callable[[str], object],
) -> AsyncGenerator[list[Record]]:
    """New results, until the campaign has ended, if that is known; *on_retry* gets errors."""
    quiet, count_at = 0, _QUIET_POLLS
    while True:
        try:
            if records := await follower.poll():
                quiet, count_at = 0, _QUIET_POLLS
            elif (quiet := quiet + 1) >= count_at:
                count_at = 2 * quiet
                if (await counts(storage, campaign)).pending == 0:
                    return
        except errors.TransientError as error:
            on_retry(f"trying again: {error.message}")
            records = []
        yield [record for record in records if record.outcome in outcomes]
        if not records:
            await asyncio.sleep(POLL_SECONDS)


async def _images(
    storage: Storage, campaign: str, damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    blobs = storage.blobs
    shards = await stored.shards_of(blobs, campaign)
    replaced = Replaced()
    async for notes in stored.records(blobs, stored.of_kind(shards, "replaced"), damaged):
        replaced.add(notes)
    again = stored.of_kind(shards, "again")
    missing = MissingRecords()
    async for part in stored.records(blobs, again, damaged):
        records = replaced.without(part, once=False)
        missing.add(record.blob for record in records if record.blob)
    drawn = stored.of_kind(shards, "images")
    async with aclosing(stored.records(blobs, drawn, damaged)) as parts:
        async for part in parts:
            records = replaced.without(part, once=True)
            missing.found(record.blob for record in records if record.blob)
            yield records
    # A worker that died in between has stored these images, and written no record.
    if missing.any:
        async with aclosing(stored.records(blobs, again, Damaged())) as parts:
            async for part in parts:
                records = replaced.without(part, once=False)
                yield [each for each in records if each.blob and missing.take(each.blob)]


async def _ended(
    storage: Storage, campaign: str | None, damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    shards = stored.of_kind(await stored.shards_of(storage.blobs, campaign), "jobs")
    settled: set[int] = set()
    async for records in stored.records(storage.blobs, shards, damaged):
        settled.update(_failure(record) for record in records if record.outcome in _BY_OPERATOR)
    # What is damaged was counted the first time.
    async with aclosing(stored.records(storage.blobs, shards, Damaged())) as parts:
        async for records in parts:
            new = []
            for record in records:
                if (failure := _failure(record)) not in settled:
                    settled.add(failure)  # its message may have failed twice, after a crash
                    new.append(record)
            yield new


async def _totals(blobs: BlobStore, shards: Collection[StoredShard], damaged: Damaged) -> Totals:
    records = jobs = 0

    async def add(each: StoredShard) -> None:
        nonlocal records, jobs
        totals = await stored.totals(blobs, each)
        if totals is not None:
            records += totals.records
            jobs += totals.jobs
            return
        # It has grown since, or lost its end in a power failure.
        async for found in stored.records(blobs, [each], damaged):
            records += len(found)
            jobs += sum(record.completes_job for record in found)

    await concurrency.for_each(shards, add, stored.CONCURRENT_READS)
    return Totals(records, jobs)


async def _totals_again(
    blobs: BlobStore,
    drawn: Collection[StoredShard],
    again: Collection[StoredShard],
    damaged: Damaged,
) -> Totals:
    """What *again* adds to the totals of *drawn*: images without a record there, and jobs' ends."""
    missing, completed = await _read_again(blobs, again, damaged)
    images = jobs = 0
    async with aclosing(stored.lines_of_all(blobs, drawn, Damaged())) as parts:
        async for shard, lines in parts:
            names = await asyncio.to_thread(missing.found_in, lines)
            if completed:
                last = [line for line, name in zip(lines, names, strict=True) if name in completed]
                records = stored.parsed(last, shard, Damaged())
                jobs += sum(not record.completes_job for record in records)
    async for part in stored.records(blobs, again, Damaged()):
        for record in part:
            if record.blob and missing.take(record.blob):
                images += 1
                jobs += record.completes_job or hashed(record.blob) in completed
    return Totals(images, jobs)


async def _read_again(
    blobs: BlobStore, shards: Collection[StoredShard], damaged: Damaged
) -> tuple[MissingRecords, set[int]]:
    """Images whose names were taken, and those that another worker than theirs found the last."""
    missing, completed = MissingRecords(), set[int]()
    async for part in stored.records(blobs, shards, damaged):
        missing.add(record.blob for record in part if record.blob)
        completed.update(hashed(record.blob or "") for record in part if record.completes)
    return missing, completed


async def _count_ended(
    blobs: BlobStore, shards: Iterable[StoredShard], damaged: Damaged
) -> Counter[Outcome]:
    """How many jobs have failed or were cancelled, as `ended` has them, or were discarded."""
    ends: dict[int, Outcome] = {}
    settled: dict[Outcome, set[int]] = {outcome: set() for outcome in _BY_OPERATOR}
    async for records in stored.records(blobs, shards, damaged):
        for record in records:
            if record.outcome in settled:
                settled[record.outcome].add(_failure(record))
            else:
                ends.setdefault(_failure(record), record.outcome)
    all_settled = set[int]().union(*settled.values())
    counted = Counter(outcome for failure, outcome in ends.items() if failure not in all_settled)
    counted["discarded"] = len(settled["discarded"])
    return counted


def _failure(record: Record) -> int:
    """Identifies one end of one message."""
    return hashed(record.source or record.key)

"""Follows new records as they come: those of submitted jobs that match what is stored."""

import asyncio
import contextlib
from collections.abc import (
    Collection,
    Container,
    Iterable,
)
from dataclasses import dataclass, field
from typing import NamedTuple

from imagefleet.errors import SetupError
from imagefleet.records import catalog, decisions
from imagefleet.records.catalog import Damaged, Positions, StoredShard
from imagefleet.records.dedupe import Replaced
from imagefleet.records.ledger import Ledgers
from imagefleet.records.log import ShardKind
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import Metadata

#: A follower's records at once, about.
_POLLED = 20_000

_FOLLOWED: Collection[ShardKind] = ("again", "images", "jobs", "settled")

#: A load notes its jobs as sent a little later: until then, a record of one waits so long.
_UNNOTED_SECONDS = 60.0


class NewRecord(NamedTuple):
    """A record, and the part of a shard that it comes from."""

    record: Record
    shard: StoredShard
    offset: int = 0


@dataclass
class RecordFilter:
    """Keeps new records of jobs that were sent, if that is noted, and that match what is stored."""

    storage: Storage
    ledgers: Ledgers
    damaged: Damaged
    #: The only jobs that count, by key; what is stored of one takes the place of its end.
    own: Container[str] | None = None
    #: Records of images are kept without a look at the images.
    trusts_images: bool = False
    #: Records of jobs that may be noted as sent any moment.
    waiting: list[NewRecord] = field(default_factory=list)

    async def fitting(
        self, new: Iterable[NewRecord], shards: Collection[StoredShard]
    ) -> list[Record]:
        """The records to hand on, of *new* and of those that waited.

        *shards*: with the notes of replaced images.
        """
        sent = list[NewRecord]()
        waiting = list[NewRecord]()
        trusted = list[Record]()
        now = self.storage.blobs.clock.now()
        read = set[str]()
        for each in (*self.waiting, *new):
            record = each.record
            kind = each.shard.kind
            is_trusted = self.own is not None or kind == "settled"
            if not (is_trusted or await self._is_sent(record, read)):
                if decisions.was_changed(
                    record, self.ledgers.of(record.campaign).known
                ):
                    continue
                if abs((now - record.at).total_seconds()) < _UNNOTED_SECONDS:
                    waiting.append(each)
                else:
                    self.damaged.add(record.key, decisions.NOT_SENT)
            elif self.trusts_images and kind == "images":
                trusted.append(record)
            elif self.own is None or record.key in self.own:
                sent.append(each)
        found = await self._stored(sent, shards)
        self.waiting = waiting
        return trusted + found

    async def _is_sent(self, record: Record, read: set[str]) -> bool:
        """Looks a job up in its campaign's ledger, which is *read* at most once a time."""
        ledger = self.ledgers.of(record.campaign)
        if decisions.is_sent(record, ledger.known):
            return True
        if record.campaign not in read:
            read.add(record.campaign)
            with contextlib.suppress(SetupError):  # no permission to read files
                await ledger.read()
        return not ledger.known or decisions.is_sent(record, ledger.known)

    async def _stored(
        self, new: list[NewRecord], shards: Collection[StoredShard]
    ) -> list[Record]:
        records = [each.record for each in new]
        images = (each for each in records if each.outcome == "completed")
        told = await decisions.metadata_of(self.storage, images)
        ends = [each for each in records if each.is_end or each.completes]
        of_ends = await decisions.stored_of(self.storage, ends)
        of_jobs = {record.job: found for record, found in of_ends}
        found = list[Record]()
        misfits = list[tuple[Record, str]]()
        for record, shard, _ in new:
            of_image = told.get(record.blob, {})
            of_job = of_jobs.get(record.job, [])
            is_again = shard.kind == "again"
            if is_again and not record.fits(of_image, of_any_drawing=True):
                found.append(record.name_taken(of_image))
            elif not (why := _misfit(record, of_image, of_job, is_again)):
                found.append(record)
            elif record.is_end and self.own is not None:
                found += of_job
            else:
                misfits.append((record, why))
        if misfits:
            replaced = Replaced()
            async for notes in catalog.records_of(shards, "replaced", Damaged()):
                replaced.add(notes)
            for record, why in misfits:
                if replaced.without([record], once=False):
                    self.damaged.add(record.blob or record.key, why)
        return found


def _misfit(
    record: Record, of_image: Metadata, of_job: list[Record], is_again: bool
) -> str:
    """The reason a record does not match what is stored; empty if it does."""
    if record.is_end:
        is_complete = decisions.are_all(of_job)
        return "the end of a job of which all is stored" if is_complete else ""
    if record.outcome == "completed":
        if not of_image or (record.completes and not decisions.are_all(of_job)):
            return "a record of an image that is not stored"
        # A worker that finds a name taken may not read what has it.
        if not record.fits(of_image) and (record.sha256 or not is_again):
            return decisions.ANOTHER
    return ""


class Follower:
    """New records of one or all campaigns, from *position* on; images drawn again come again."""

    def __init__(
        self,
        storage: Storage,
        campaign: str | None = None,
        position: Positions | None = None,
        damaged: Damaged | None = None,
        *,
        most: int | None = None,
        part_bytes: int = catalog.PART_BYTES,
        own: Container[str] | None = None,
        trusts_images: bool = False,
    ) -> None:
        """A poll returns some *most* records, and reads a shard by *part_bytes*."""
        self.position: Positions = dict(position or {})
        self._storage = storage
        self._campaign = campaign
        self._damaged = damaged or Damaged()
        self._most = most or _POLLED
        self._part_bytes = part_bytes
        #: Sizes of shards with nothing to be read until they grow.
        self._given_up: Positions = {}
        self.checks = RecordFilter(
            storage, Ledgers(storage), self._damaged, own, trusts_images
        )

    @property
    def start(self) -> Positions:
        """The position of one that goes on later: before all that still waits."""
        waiting = {
            each.shard.blob.name: each.offset for each in reversed(self.checks.waiting)
        }
        return self.position | waiting

    async def poll(self) -> list[Record]:
        """The next new records that fit: two listings, and a read for each shard that has grown."""
        before = dict(self.position), self.checks.waiting
        try:
            shards = await catalog.shards_of(self._storage, self._campaign, packs=False)
            found = await self.checks.fitting((), shards)
            for shard in shards:
                name = shard.blob.name
                size = shard.blob.size_bytes
                if shard.kind not in _FOLLOWED or self._given_up.get(name) == size:
                    continue
                offset = self.position.get(name, 0)
                if size - offset < catalog.LEAST_SHARD_BYTES:
                    continue
                if len(found) >= self._most:
                    break
                found += await self._read(shard, offset, shards)
        except BaseException:  # what was read is not handed over, so it is read again
            self.position, self.checks.waiting = before
            raise
        return found

    async def _read(
        self, each: StoredShard, offset: int, shards: Collection[StoredShard]
    ) -> list[Record]:
        name = each.blob.name
        found = list[Record]()
        decoder = catalog.ShardDecoder(offset)
        async for lines in catalog.lines(
            each, decoder, self._damaged, part_bytes=self._part_bytes
        ):
            records = await asyncio.to_thread(
                catalog.parsed, lines, each, self._damaged
            )
            new = [NewRecord(record, each, offset) for record in records]
            found += await self.checks.fitting(new, shards)
            if len(found) >= self._most:
                break
        if decoder.is_damaged and decoder.position == offset > 0:
            return await self._read(
                each, 0, shards
            )  # `end` may see a local file during an append
        if decoder.is_damaged or decoder.position == offset:
            self._given_up[name] = each.blob.size_bytes
        self.position[name] = decoder.position
        return found

"""Decides which records count: one of each image, and each job's first end that is not settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from typing import Self

from imagefleet import concurrency
from imagefleet.job.message import SUFFIXES, image_stem, job_key
from imagefleet.records import catalog
from imagefleet.records.catalog import Damaged, StoredShard
from imagefleet.records.dedupe import Again, Replaced, Rivals
from imagefleet.records.ledger import HASH_BYTES, Digests, id_hash
from imagefleet.records.log import ShardKind
from imagefleet.records.record import Outcome, Record, hashed
from imagefleet.storage.protocol import BlobStore

#: Names of one job's images.
_LOOKED_UP_AT_ONCE = 64

_SUFFIXES = tuple(SUFFIXES.values())

_Lines = AsyncGenerator[tuple[StoredShard, list[bytes]]]
_Parts = AsyncGenerator[list[Record]]

#: Why a record does not fit.
ANOTHER = "a record of another image than the one that is stored"
NOT_SENT = "a record of a job that was not sent"

#: A look at the images of so many ended jobs costs less than to read the records of images, and of
#: one more for each of these bytes.
_FEW_ENDS = 100
_BYTES_OF_LOOK_UP = 64 * 2**10


class ImageRecords:
    """A campaign's records of images, without those of drawings that were replaced."""

    def __init__(
        self, blobs: BlobStore, shards: Sequence[StoredShard], damaged: Damaged
    ) -> None:
        self.again = Again()
        self._blobs = blobs
        self._shards = shards
        self._damaged = damaged
        self._replaced = Replaced()

    async def read(self) -> Self:
        """Reads the notes of replaced drawings, and the records of names that were taken."""
        async for notes in catalog.records_of(self._shards, "replaced", self._damaged):
            self._replaced.add(notes)
        async for records in self.drawings("again", self._damaged):
            self.again.add(records)
        return self

    async def drawings(self, kind: ShardKind, damaged: Damaged) -> _Parts:
        async for records in catalog.records_of(self._shards, kind, damaged):
            yield self._replaced.without(records, once=kind == "images")

    async def each_once(self) -> _Parts:
        """The record of each image once, and last the jobs that failed for a taken name."""
        shards = catalog.of_kind(self._shards, "images")
        first, second, count = await _twice(shards, self._damaged)
        rivals = Rivals(count)
        async for _, lines in first:
            await asyncio.to_thread(rivals.note, lines)
        async for shard, lines in second:
            async for part in catalog.records_in(shard, lines, self._damaged):
                records = self._replaced.without(part, once=True)
                records = await self._without_rivals(records, rivals)
                self.again.found(records)
                yield records
        async for records in self.left():
            yield records

    async def find(self) -> int:
        """Finds the records of images whose names were taken; counts jobs that others completed."""
        jobs = 0
        shards = catalog.of_kind(self._shards, "images") if self.again else []
        async for shard, lines in catalog.lines_of_all(shards, Damaged()):
            found = await asyncio.to_thread(self.again.find, lines)
            records = catalog.parsed(found, shard, Damaged())
            self.again.found(records)
            for record in records:
                jobs += self.again.completes(record) > record.completes_job
        return jobs

    async def left(self) -> _Parts:
        """Images whose taken name has no other record, and jobs that failed for a taken name."""
        if not self.again:
            return
        async for records in self.drawings("again", Damaged()):
            # A worker that died in between has stored these images, and written no record.
            names = (record.blob for record in filter(self.again.is_left, records))
            found = await metadata_of(self._blobs, names)
            left = []
            for record in records:
                if not (metadata := found.get(record.blob, {})):
                    continue  # there is no such image
                is_missing = self.again.is_missing(record)
                if is_missing and record.fits(metadata, of_any_drawing=True):
                    self.again.found([record])
                    left.append(record)
                elif self.again.take(record):
                    left.append(record.name_taken(metadata))
            yield left

    async def _without_rivals(
        self, records: list[Record], rivals: Rivals
    ) -> list[Record]:
        """Keeps, of records with the same name, the first that fits the stored image."""
        contested = list(filter(rivals.include, records))
        if not contested:
            return records
        self._damaged.saw_images = True
        found = await metadata_of(self._blobs, (record.blob for record in contested))
        # Where the image of a name is gone, it may be there in another format.
        gone = {record.stem for record in contested if not found[record.blob]}
        for record in contested:
            if record.stem in gone and rivals.deny(record):
                gone.add(record.key)
        others = {f"{stem}.{suffix}" for stem in gone for suffix in _SUFFIXES}
        found |= await metadata_of(self._blobs, others - found.keys())
        kept = []
        for record in records:
            if (metadata := found.get(record.blob)) is None:
                kept.append(record)
                continue
            stems = {record.stem, record.key} if rivals.deny(record) else {record.stem}
            names = (f"{stem}.{suffix}" for stem in stems for suffix in _SUFFIXES)
            is_there = metadata or not any(map(found.get, names))
            if not is_there or not record.fits(metadata):
                self._damaged.add(record.blob or "", ANOTHER)
            elif rivals.take(str(record.blob) if metadata else record.stem):
                kept.append(record)
        return kept


async def _twice(
    shards: Collection[StoredShard], damaged: Damaged
) -> tuple[_Lines, _Lines, int | None]:
    """The lines of *shards* two times, read once if they are few; then also their number."""
    if catalog.size_bytes(shards) > catalog.PART_BYTES:
        first = catalog.lines_of_all(shards, Damaged())
        return first, catalog.lines_of_all(shards, damaged), None
    kept = [each async for each in catalog.lines_of_all(shards, damaged)]
    count = sum(len(lines) for _, lines in kept)
    return _kept(kept), _kept(kept), count


async def _kept(lines: Iterable[tuple[StoredShard, list[bytes]]]) -> _Lines:
    for each in lines:
        yield each


async def metadata_of(
    blobs: BlobStore, names: Iterable[str | None]
) -> dict[str | None, Mapping[str, str]]:
    """The metadata of images, and their names; empty for an image that is gone."""
    found: dict[str | None, Mapping[str, str]] = {}

    async def look(blob: str) -> None:
        told = await blobs.metadata(blob)
        found[blob] = {} if told is None else {**told, "name": blob}

    wanted = {name for name in names if name}
    await concurrency.for_each(wanted, look, catalog.CONCURRENT_READS)
    return found


async def stored_of(
    blobs: BlobStore, records: Iterable[Record]
) -> list[tuple[Record, list[Record]]]:
    """Pairs each record with the stored images of its job, if they have its digest."""
    found: list[tuple[Record, list[Record]]] = []

    async def look(record: Record) -> None:
        digest = record.digest or ""  # of a message that could not be read
        images = await stored_images(blobs, record.campaign, record.id, digest)
        found.append((record, images))

    await concurrency.for_each(records, look, catalog.CONCURRENT_READS)
    return found


async def stored_images(
    blobs: BlobStore, campaign: str, job_id: str, digest: str = ""
) -> list[Record]:
    """A job's images, as their metadata tells; none as long as the first one is missing.

    *digest*: how that of the job begins, where it is known. Nothing is listed: it may be much.
    """

    async def image(
        index: int = 0, stage: int = 1, suffixes: Iterable[str] = _SUFFIXES
    ) -> Record | None:
        """The record of one, in any format; a read for each."""
        stem = image_stem(job_key(campaign, job_id), index, stage)
        for suffix in suffixes:
            blob = await blobs.record(f"{stem}.{suffix}")
            if blob is None or blob.metadata.get("job", job_id) != job_id:
                continue
            known = {
                "outcome": "completed",
                "id": job_id,
                "campaign": campaign,
                "at": blob.created_at,
                "blob": blob.name,
                "size_bytes": blob.size_bytes,
                "index": index,
            }
            found = Record.of_blob(known, blob.metadata)
            counts = {
                "images": 1 if stage > 1 else max(found.images, index + 1),
                "stage": stage,
                "stages": max(stage, found.stages),
            }
            found = found.model_copy(update=counts)
            if found.stage < found.stages or (found.digest or "").startswith(digest):
                return found
        return None

    if (first := await image()) is None:
        return []
    found = [first]

    async def look(place: tuple[int, int]) -> None:
        # Images of one stage have one format.
        suffixes = [(first.blob or "").rpartition(".")[2]] if place[0] else _SUFFIXES
        if (record := await image(*place, suffixes)) is not None:
            found.append(record)

    images = [(index, 1) for index in range(1, first.images)]
    stages = [(0, stage) for stage in range(2, first.stages + 1)]
    await concurrency.for_each([*images, *stages], look, _LOOKED_UP_AT_ONCE)
    if first.stages == 1:  # another job of that id may have begun to draw as many
        found = [record for record in found if record.digest == first.digest]
    return sorted(found, key=lambda record: (record.stage, record.index))


def are_all(images: Sequence[Record]) -> bool:
    if not images or images[-1].stage < images[-1].stages:
        return False
    return len(images) >= images[0].images


def is_sent(record: Record, known: Digests) -> bool:
    """True if the record's job is *known*; an unreadable job has no digest, a stage its own."""
    digest = known.get(id_hash(record.id))
    is_of_stage = record.outcome == "completed" and record.stage < record.stages
    if is_of_stage or not record.digest:
        return digest is not None
    return digest == bytes.fromhex(record.digest)[:HASH_BYTES]


def was_changed(record: Record, known: Digests) -> bool:
    """True if the record's job was sent, and has been sent with another content since."""
    digest = bytes.fromhex(record.digest or "")[:HASH_BYTES]
    return known.was(id_hash(record.id) + digest)


class Ends:
    """The jobs that ended without all of their images, each once; those replayed since are none.

    Whoever may store images may write that a job has failed; a job that is complete has not.
    """

    def __init__(
        self,
        blobs: BlobStore,
        shards: Sequence[StoredShard],
        known: Digests | None,
        damaged: Damaged,
        job_id: str | None = None,
    ) -> None:
        """Only *known* jobs count, if they are given, and those of *job_id*."""
        self.outcomes: dict[int, Outcome] = {}
        """Failed or cancelled, by `job`."""
        self.unknown: set[str] = set()
        """Jobs that were not sent."""
        self.damaged = damaged
        self.shards = shards
        self.blobs = blobs
        self._campaigns: set[str] = set()
        self._discarded: set[int] = set()
        self._settled: set[int] = set()
        self._known = known
        self._job_id = job_id

    async def read_settled(self) -> Self:
        """Reads what the operator has replayed and discarded."""
        async for records in catalog.records_of(self.shards, "settled", self.damaged):
            self._settled.update(record.failure for record in records)
            for record in self.sent(records):
                if record.outcome == "discarded":
                    self._discarded.add(self.job(record))
        return self

    async def read(self) -> Self:
        """Reads all ends, which `outcomes` has then."""
        await self.read_settled()
        async for _ in self.records():
            pass
        return self

    async def records(self) -> _Parts:
        """The ends of jobs, each once, without those of jobs of which all images are stored."""
        shards = catalog.of_kind(self.shards, "jobs")
        first, second, _ = await _twice(shards, self.damaged)
        perhaps = await self._with_images(first)
        async for shard, lines in second:
            async for records in catalog.records_in(shard, lines, self.damaged):
                new = self.add(records)
                looked_up = [
                    record
                    for record in new
                    if perhaps is None or self.job(record) in perhaps
                ]
                self.damaged.saw_images |= bool(looked_up)
                for record, images in await stored_of(self.blobs, looked_up):
                    if are_all(images):
                        self.complete(self.job(record))
                yield [record for record in new if self.job(record) in self.outcomes]

    async def _with_images(self, ended: _Lines) -> set[int] | None:
        """The jobs with ends and with records of images; None if a look at each costs less."""
        async for shard, lines in ended:
            async for records in catalog.records_in(shard, lines, Damaged()):
                self.add(records)
        jobs, found = {*self.outcomes}, set[int]()
        self.outcomes.clear()
        images = catalog.of_kind(self.shards, "images", "again")
        most = _FEW_ENDS + catalog.size_bytes(images) // _BYTES_OF_LOOK_UP
        if len(jobs) <= most:
            return None
        images = [shard for shard in images if shard.campaign in self._campaigns]
        async for records in catalog.records(images, Damaged()):
            found |= jobs & {record.job for record in records}
        return found

    async def without_unstored(self, records: list[Record]) -> list[Record]:
        """Leaves out images, of jobs that ended otherwise, which only a record tells of."""
        contested = {each.blob for each in records if self.job(each) in self.outcomes}
        found = await metadata_of(self.blobs, contested)
        kept = []
        for record in records:
            metadata = found.get(record.blob)
            if metadata is None or (metadata and record.fits(metadata)):
                kept.append(record)
            else:
                self.damaged.add(
                    record.key, "a record of an image that is not stored: its job ended"
                )
        return kept

    @property
    def discarded(self) -> int:
        """Jobs that were discarded, and have not ended otherwise since."""
        return len(self._discarded - self.outcomes.keys())

    def job(self, record: Record) -> int:
        """A hash of a record's job: by its name where one digest of each name is known."""
        return record.job if self._known is None else hashed(record.key)

    def complete(self, job: int) -> None:
        """Notes that all of a job's images are stored, so that nothing else ended it."""
        self.outcomes.pop(job, None)
        self._discarded.discard(job)

    def sent(self, records: Iterable[Record]) -> list[Record]:
        """The records of jobs that are known to be sent; notes the others."""
        found = []
        for record in records:
            if self._known is None or is_sent(record, self._known):
                found.append(record)
            elif not was_changed(record, self._known):
                self.unknown.add(f"{record.id} {record.digest}")
                self.damaged.add(record.key, NOT_SENT)
        return found

    def add(self, records: list[Record]) -> list[Record]:
        """The first end of each job that has failed or was cancelled, and not been settled."""
        new = []
        for record in records:
            is_asked_for = self._job_id in {None, record.id}
            if not record.is_end or not is_asked_for or not self.sent([record]):
                continue
            job = self.job(record)
            if record.failure not in self._settled and job not in self.outcomes:
                self.outcomes[job] = record.outcome
                self._campaigns.add(record.campaign)
                new.append(record)
        return new

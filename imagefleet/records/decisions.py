"""Which records decide: each image's one, and each job's first end that nobody has settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from typing import Self

from imagefleet import concurrency
from imagefleet.job.message import SUFFIXES, image_stem, job_key
from imagefleet.records import catalog
from imagefleet.records.catalog import Damaged, StoredShard
from imagefleet.records.dedupe import Again, Replaced, Rivals, jobs_in
from imagefleet.records.ledger import HASH_BYTES, Digests, id_hash
from imagefleet.records.record import Outcome, Record, hashed
from imagefleet.storage.protocol import BlobStore

#: Names of one job's images.
_LOOKED_UP_AT_ONCE = 64

_SUFFIXES = tuple(SUFFIXES.values())

_Lines = AsyncGenerator[tuple[StoredShard, list[bytes]]]

#: Why a record does not fit.
ANOTHER = "a record of another image than the one that is stored"
NOT_SENT = "a record of a job that was not sent"

#: A look at the images of so many ended jobs costs less than to read the records of images, and of
#: one more for each of these bytes.
_FEW_ENDS = 100
_BYTES_OF_LOOK_UP = 64 * 2**10


async def images(
    shards: Collection[StoredShard], again: Again, replaced: Replaced, damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    """The record of each image once, and last the jobs that failed for a taken name."""
    first, second, count = await _twice(catalog.of_kind(shards, "images"), damaged)
    rivals = Rivals(count)
    async for _, lines in first:
        await catalog.computed(len(lines), rivals.note, lines)
    async for shard, lines in second:
        async for part in catalog.records_in(shard, lines, damaged):
            records = replaced.without(part, once=True)
            records = await _without_rivals(shards, records, rivals, damaged)
            again.found(records)
            yield records
    async for records in left(shards, again, replaced):
        yield records


async def _twice(
    shards: Collection[StoredShard], damaged: Damaged
) -> tuple[_Lines, _Lines, int | None]:
    """The lines of *shards* two times, read once if they are few; then also their number."""
    if catalog.size_bytes(shards) > catalog.PART_BYTES:
        return (
            catalog.lines_of_all(shards, Damaged()),
            catalog.lines_of_all(shards, damaged),
            None,
        )
    kept = [each async for each in catalog.lines_of_all(shards, damaged)]
    return _kept(kept), _kept(kept), sum(len(lines) for _, lines in kept)


async def _kept(lines: Iterable[tuple[StoredShard, list[bytes]]]) -> _Lines:
    for each in lines:
        yield each


async def again(
    shards: Collection[StoredShard], damaged: Damaged
) -> tuple[Again, Replaced]:
    """What the records of taken names and the notes of replaced drawings say."""
    again, replaced = Again(), Replaced()
    async for notes in catalog.records(catalog.of_kind(shards, "replaced"), damaged):
        replaced.add(notes)
    async for part in catalog.records(catalog.of_kind(shards, "again"), damaged):
        again.add(replaced.without(part, once=False))
    return again, replaced


async def find(shards: Collection[StoredShard], again: Again) -> int:
    """Finds the records of images whose names were taken; counts the jobs that others completed."""
    jobs = 0
    drawn = catalog.of_kind(shards, "images") if again else []
    async for shard, lines in catalog.lines_of_all(drawn, Damaged()):
        found = await asyncio.to_thread(again.find, lines)
        records = catalog.parsed(found, shard, Damaged())
        again.found(records)
        jobs += sum(
            again.completes(record) > record.completes_job for record in records
        )
    return jobs


async def left(
    shards: Collection[StoredShard], again: Again, replaced: Replaced
) -> AsyncGenerator[list[Record]]:
    """Of names that were taken: images without another record, and jobs that failed for it."""
    taken = catalog.of_kind(shards, "again") if again else []
    async for part in catalog.records(taken, Damaged()):
        records = replaced.without(part, once=False)
        # A worker that died in between has stored these images, and written no record.
        found = await metadata_of(
            shards, (each.blob for each in filter(again.is_left, records))
        )
        left = []
        for record in records:
            if not (metadata := found.get(record.blob, {})):
                continue  # there is no such image
            if again.is_missing(record) and record.fits(metadata, of_any_drawing=True):
                again.found([record])
                left.append(record)
            elif again.take(record):
                left.append(record.name_taken(metadata))
        yield left


async def _without_rivals(
    shards: Collection[StoredShard],
    records: list[Record],
    rivals: Rivals,
    damaged: Damaged,
) -> list[Record]:
    """Of records with the same name, the first that fits the stored image."""
    contested = list(filter(rivals.include, records))
    damaged.saw_images |= bool(contested)
    found = await metadata_of(shards, (record.blob for record in contested))
    gone = {each.stem for each in contested if not found[each.blob]}
    gone |= {each.key for each in contested if each.stem in gone and rivals.deny(each)}
    others = {f"{stem}.{suffix}" for stem in gone for suffix in _SUFFIXES}
    found |= await metadata_of(shards, others - found.keys())
    kept = []
    for record in records:
        if (metadata := found.get(record.blob)) is None:
            kept.append(record)
            continue
        stems = {record.stem, record.key} if rivals.deny(record) else {record.stem}
        names = (f"{stem}.{suffix}" for stem in stems for suffix in _SUFFIXES)
        is_there = metadata or not any(map(found.get, names))
        if not is_there or not record.fits(metadata):
            damaged.add(record.blob or "", ANOTHER)
        elif rivals.take(str(record.blob) if metadata else record.stem):
            kept.append(record)
    return kept


async def metadata_of(
    shards: Collection[StoredShard], names: Iterable[str | None]
) -> dict[str | None, Mapping[str, str]]:
    """The metadata of images, and their names; of one that is gone there is none."""
    found: dict[str | None, Mapping[str, str]] = {}
    if not (wanted := {name for name in names if name}):
        return found

    async def look(blob: str) -> None:
        told = await store.metadata(blob)
        found[blob] = {} if told is None else {**told, "name": blob}

    store = next(shard.store for shard in shards if shard.kind in {"images", "again"})
    await concurrency.for_each(wanted, look, catalog.CONCURRENT_READS)
    return found


async def ended(
    blobs: BlobStore, shards: Collection[StoredShard], ends: Ends, damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    """The jobs that have failed or were cancelled, each once, but those of which all is stored.

    Whoever may store images may write that a job has failed; a job that is complete has not.
    """
    first, second, _ = await _twice(catalog.of_kind(shards, "jobs"), damaged)
    perhaps = await _with_images(first, shards, ends)
    async for shard, lines in second:
        async for records in catalog.records_in(shard, lines, damaged):
            new = ends.add(records)
            looked_up = [
                each for each in new if perhaps is None or ends.job(each) in perhaps
            ]
            damaged.saw_images |= bool(looked_up)
            for record, images in await stored_of(blobs, looked_up):
                if are_all(images):
                    ends.complete(ends.job(record))
            yield [record for record in new if ends.job(record) in ends.outcomes]


async def not_ended(
    shards: Collection[StoredShard], records: list[Record], ends: Ends
) -> list[Record]:
    """Records of images without those that only a record tells of, of jobs that ended otherwise."""
    contested = {each.blob for each in records if ends.job(each) in ends.outcomes}
    found = await metadata_of(shards, contested)
    kept = []
    for record in records:
        if record.blob in contested and not (
            found[record.blob] and record.fits(found[record.blob])
        ):
            ends.damaged.add(
                record.key, "a record of an image that is not stored: its job ended"
            )
        else:
            kept.append(record)
    return kept


async def _with_images(
    ended: _Lines, shards: Collection[StoredShard], ends: Ends
) -> set[int] | None:
    """The jobs with ends and with images, by their records; None if so few ended that all may be.

    Then a look at the images of each costs less.
    """
    async for shard, lines in ended:
        async for records in catalog.records_in(shard, lines, Damaged()):
            ends.add(records)
    jobs, found = {*ends.outcomes}, set[int]()
    ends.outcomes.clear()
    drawn = [*catalog.of_kind(shards, "images"), *catalog.of_kind(shards, "again")]
    if len(jobs) <= _FEW_ENDS + catalog.size_bytes(drawn) // _BYTES_OF_LOOK_UP:
        return None
    of_campaigns = [shard for shard in drawn if shard.campaign in ends.campaigns]
    async for shard, lines in catalog.lines_of_all(of_campaigns, Damaged()):
        found |= jobs & await asyncio.to_thread(jobs_in, lines, shard.campaign)
    return found


async def stored_of(
    blobs: BlobStore, records: Iterable[Record]
) -> list[tuple[Record, list[Record]]]:
    """With each record the images of its job that are stored, if they have its digest."""
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
    """Whether its job is *known*; what could not be read has no digest, a stage its own."""
    digest = known.get(id_hash(record.id))
    is_of_stage = record.outcome == "completed" and record.stage < record.stages
    if is_of_stage or not record.digest:
        return digest is not None
    return digest == bytes.fromhex(record.digest)[:HASH_BYTES]


class Ends:
    """The jobs that ended without all of their images, each once; those replayed since are none."""

    def __init__(
        self, known: Digests | None, damaged: Damaged, job_id: str | None = None
    ) -> None:
        """Only *known* jobs count, if they are given, and those of *job_id*."""
        self.outcomes: dict[int, Outcome] = {}
        """Which of both, by `job`."""
        self.campaigns: set[str] = set()
        self.unknown: set[str] = set()
        """Jobs that were not sent."""
        self._discarded: set[int] = set()
        self._settled: set[int] = set()
        self._known = known
        self.damaged = damaged
        self._job_id = job_id

    async def read(self, shards: Iterable[StoredShard]) -> Self:
        """Reads what the operator has replayed and discarded."""
        async for records in catalog.records(
            catalog.of_kind(shards, "settled"), self.damaged
        ):
            self._settled.update(record.failure for record in records)
            discarded = (
                each for each in self.sent(records) if each.outcome == "discarded"
            )
            self._discarded.update(map(self.job, discarded))
        return self

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

    def sent(self, records: list[Record]) -> list[Record]:
        if (known := self._known) is None:
            return records
        found = []
        for record in records:
            if is_sent(record, known):
                found.append(record)
            else:
                self.unknown.add(f"{record.id} {record.digest}")
                self.damaged.add(record.key, NOT_SENT)
        return found

    def add(self, records: list[Record]) -> list[Record]:
        """The first end of each job that has failed or was cancelled, and not been settled."""
        new = []
        ended = [
            record
            for record in records
            if record.is_end and self._job_id in {None, record.id}
        ]
        for record in self.sent(ended):
            if (
                record.failure not in self._settled
                and self.job(record) not in self.outcomes
            ):
                self.outcomes[self.job(record)] = record.outcome
                self.campaigns.add(record.campaign)
                new.append(record)
        return new

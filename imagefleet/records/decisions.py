"""Decides which records count: one of each image, and each job's first end that is not settled."""

import asyncio
import contextlib
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Sequence,
)
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import Self

from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.files import pack
from imagefleet.job.chain import SEPARATOR
from imagefleet.job.message import SUFFIXES, image_stem, job_key
from imagefleet.records import catalog, dedupe
from imagefleet.records.catalog import Damaged, RecordParts, ShardLines, StoredShard
from imagefleet.records.dedupe import Again, Replaced, Rivals
from imagefleet.records.ledger import HASH_BYTES, Digests, id_hash
from imagefleet.records.log import ShardKind
from imagefleet.records.record import Outcome, Record, hashed
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import BlobStore, Metadata

#: Names of one job's images.
_LOOKED_UP_AT_ONCE = 64

#: What is told of an image in a pack, as the metadata of a blob tell of theirs.
_OF_PACKED = ("digest", "sha256", "spot")

_SUFFIXES = tuple(SUFFIXES.values())


Records = list[Record]

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
        self,
        storage: Storage,
        shards: Sequence[StoredShard],
        damaged: Damaged,
        campaign: str | None = None,
    ) -> None:
        """*campaign*, if it is one, may have packs and no shards."""
        self.again = Again()
        self._campaigns = {shard.campaign for shard in shards if shard.has_packs}
        if campaign is not None and not shards:
            self._campaigns.add(campaign)
        self._storage = storage
        self._shards = shards
        self._damaged = damaged
        self._replaced = Replaced()
        self._packs: set[str] = set()
        #: Records of images in packs, of names that others have, too.
        self._claims: Records = []

    async def read(self) -> Self:
        """Reads the notes of replaced drawings, and the records of names that were taken."""
        async for notes in catalog.records_of(self._shards, "replaced", self._damaged):
            self._replaced.add(notes)
        async for records in self.drawings("again", self._damaged):
            self.again.add(records)
        return self

    async def drawings(self, kind: ShardKind, damaged: Damaged) -> RecordParts:
        async for records in catalog.records_of(self._shards, kind, damaged):
            self._packs.update(record.pack for record in records if record.pack)
            yield self._replaced.without(records, once=kind == "images")

    async def unrecorded(self) -> Records:
        """Images in packs that none of the records read so far is of.

        Their worker has died before it wrote them, or writes them in this moment.
        """
        found: Records = []

        async def read(name: str) -> None:
            contents = await pack.head(self._storage.packs, name)
            found.extend(contents.records if contents else ())

        for campaign in self._campaigns:
            left = set[str]()
            with contextlib.suppress(SetupError):  # no permission to list them
                names = self._storage.packs.names(f"{campaign}/")
                left = {name async for name in names if name not in self._packs}
            await concurrency.for_each(sorted(left), read, catalog.CONCURRENT_READS)
        return self._replaced.without(found, once=True)

    async def packed(self, is_wanted: Callable[[str], bool]) -> Records:
        """Records of the images in packs whose stems *is_wanted* takes; looks at nothing stored."""
        found = []
        shards = catalog.of_kind(self._shards, "images", "again")
        choose = partial(dedupe.packed, is_wanted)
        async for records in catalog.records_among(shards, choose):
            found += self._replaced.without(records, once=False)
        return found

    async def each_once(self) -> RecordParts:
        """The record of each image once, and last the jobs that failed for a taken name."""
        shards = catalog.of_kind(self._shards, "images")
        first, second, count = await _twice(shards, self._damaged)
        rivals = Rivals(count)
        async for _, lines in first:
            await asyncio.to_thread(rivals.note, lines)
            self._packs |= await asyncio.to_thread(dedupe.packs_in, lines)
        unrecorded = await self.unrecorded()
        rivals.note([record.line() for record in unrecorded])
        if self._packs and rivals:
            self._claims = await self.packed(rivals.have)
            self._claims += filter(rivals.include, unrecorded)
        async for shard, lines in second:
            async for part in catalog.records_in(shard, lines, self._damaged):
                records = self._replaced.without(part, once=True)
                yield await self._without_rivals(records, rivals)
        yield await self._without_rivals(unrecorded, rivals)
        async for records in self.left():
            yield records

    async def find(self) -> int:
        """Finds the records of images whose names were taken; counts jobs that others completed."""
        jobs = 0
        shards = catalog.of_kind(self._shards, "images") if self.again else []
        async for records in catalog.records_among(shards, self.again.find):
            self.again.found(records)
            for record in records:
                jobs += self.again.completes(record) > record.completes_job
        return jobs

    async def left(self) -> RecordParts:
        """Images whose taken name has no other record, and jobs that failed for a taken name."""
        if not self.again:
            return
        async for records in self.drawings("again", Damaged()):
            # A worker that died in between has stored these images, and written no record.
            unsure = filter(self.again.is_left, records)
            found = await metadata_of(self._storage, unsure)
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

    async def _without_rivals(self, records: Records, rivals: Rivals) -> Records:
        """Keeps, of records with the same name, the first that fits the stored image."""
        contested = list(filter(rivals.include, records))
        if not contested:
            self.again.found(records)
            return records
        self._damaged.saw_images = True
        taken = {str(record.blob) for record in contested}
        claims = (record for record in self._claims if record.blob in taken)
        found = await metadata_of(self._storage, [*taken, *contested, *claims])
        # Where the image of a name is gone, it may be there in another format.
        gone = {record.stem for record in contested if not found[record.blob]}
        for record in contested:
            if record.stem in gone and rivals.deny(record):
                gone.add(record.key)
        others = {f"{stem}.{suffix}" for stem in gone for suffix in _SUFFIXES}
        found |= await metadata_of(self._storage, others - found.keys())
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
        self.again.found(kept)
        return kept


async def _twice(
    shards: Collection[StoredShard], damaged: Damaged
) -> tuple[ShardLines, ShardLines, int | None]:
    """The lines of *shards* two times, read once if they are few; then also their number."""
    if catalog.size_bytes(shards) > catalog.PART_BYTES:
        first = catalog.lines_of_all(shards, Damaged())
        return first, catalog.lines_of_all(shards, damaged), None
    kept = [each async for each in catalog.lines_of_all(shards, damaged)]
    count = sum(len(lines) for _, lines in kept)
    return _kept(kept), _kept(kept), count


async def _kept(lines: Iterable[tuple[StoredShard, list[bytes]]]) -> ShardLines:
    for each in lines:
        yield each


async def metadata_of(
    storage: Storage, images: Iterable[Record | str]
) -> dict[str | None, Metadata]:
    """The metadata of images, and their names; empty for an image that is gone.

    *images*: records, which tell their packs, or names. Of several that one name has, the first
    that was stored counts, and of these the first by its pack's name.
    """
    wanted = {
        (image, None) if isinstance(image, str) else (image.blob, image.pack)
        for image in images
    }
    found: dict[str | None, list[tuple[datetime, str, Metadata]]]
    found = {name: [] for name, _ in wanted}

    async def look(blob: str) -> None:
        if (image := await storage.blobs.record(blob)) is not None:
            found[blob].append((image.created_at, "", image.metadata))

    async def look_into(name: str) -> None:
        contents, blob = await concurrency.gather(
            pack.head(storage.packs, name), storage.packs.record(name)
        )
        if contents is None or blob is None:
            return
        for record in contents.records:
            if (record.blob, name) in wanted:
                told = {each: str(getattr(record, each)) for each in _OF_PACKED}
                found[record.blob].append((blob.created_at, name, told))

    blobs = [str(name) for name, in_pack in wanted if in_pack is None]
    packs = {in_pack for _, in_pack in wanted if in_pack is not None}
    await concurrency.for_each(blobs, look, catalog.CONCURRENT_READS)
    await concurrency.for_each(packs, look_into, catalog.CONCURRENT_READS)
    return {
        name: {**min(stored, key=itemgetter(0, 1))[2], "name": str(name)}
        if stored
        else {}
        for name, stored in found.items()
    }


async def stored_of(
    storage: Storage, records: Collection[Record]
) -> list[tuple[Record, Records]]:
    """Pairs each record with the stored images of its job, if they have its digest.

    That of an image in a pack with itself, if it is there.
    """
    found = []
    packed = [record for record in records if record.pack is not None]
    single = [record for record in records if record.pack is None]

    async def look(record: Record) -> None:
        digest = record.digest or ""  # of a message that could not be read
        images = await stored_images(storage.blobs, record.campaign, record.id, digest)
        found.append((record, images))

    await concurrency.for_each(single, look, catalog.CONCURRENT_READS)
    told = await metadata_of(storage, packed)
    for record in packed:
        metadata = told[record.blob]
        is_there = metadata and record.fits(metadata)
        found.append((record, [record] if is_there else []))
    return found


async def job_images(
    storage: Storage, campaign: str, job_id: str, digest: str = ""
) -> Records:
    """A job's images as `stored_images`, or else its image in a pack."""
    images = await stored_images(storage.blobs, campaign, job_id, digest)
    if not images and catalog.may_have_packs(
        campaign, await catalog.packed_campaigns(storage)
    ):
        shards = await catalog.shards_of(storage, campaign)
        inside = await packed_images(storage, shards, {job_key(campaign, job_id)})
        for record, stored in await stored_of(storage, inside):
            if (record.digest or "").startswith(digest):
                images = images or stored
    return images


async def packed_images(
    storage: Storage, shards: Iterable[StoredShard], keys: Container[str]
) -> Records:
    """Records of images in packs, of the jobs with these *keys*; reads all of campaigns with packs.

    Nobody has looked whether they fit what is stored.
    """
    with_packs = [shard for shard in shards if shard.has_packs]
    if not with_packs:
        return []
    images = await ImageRecords(storage, with_packs, Damaged()).read()
    return await images.packed(lambda stem: stem.partition(SEPARATOR)[0] in keys)


async def stored_images(
    blobs: BlobStore, campaign: str, job_id: str, digest: str = ""
) -> Records:
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
    return known.was(
        id_hash(record.id) + bytes.fromhex(record.digest or "")[:HASH_BYTES]
    )


class Ends:
    """The jobs that ended without all of their images, each once; those replayed since are none.

    Whoever may store images may write that a job has failed; a job that is complete has not.
    """

    def __init__(
        self,
        storage: Storage,
        shards: Sequence[StoredShard],
        known: Digests | None,
        damaged: Damaged,
        job_id: str | None = None,
    ) -> None:
        """Only *known* jobs count, if they are given, and those of *job_id*."""
        #: Failed or cancelled, by `job`.
        self.outcomes: dict[int, Outcome] = {}
        #: Jobs that were not sent.
        self.unknown: set[str] = set()
        self.damaged = damaged
        self.shards = shards
        self.storage = storage
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

    async def records(self) -> RecordParts:
        """The ends of jobs, each once, without those of jobs of which all images are stored."""
        shards = catalog.of_kind(self.shards, "jobs")
        first, second, _ = await _twice(shards, self.damaged)
        perhaps, packed = await self._with_images(first)
        async for shard, lines in second:
            async for records in catalog.records_in(shard, lines, self.damaged):
                new = self.add(records)
                looked_up = [
                    record
                    for record in new
                    if perhaps is None or self.job(record) in perhaps
                ]
                self.damaged.saw_images |= bool(looked_up)
                keys = {record.key for record in looked_up}
                looked_up += [record for record in packed if record.key in keys]
                for record, images in await stored_of(self.storage, looked_up):
                    if are_all(images):
                        self.complete(self.job(record))
                yield [record for record in new if self.job(record) in self.outcomes]

    async def _with_images(self, ended: ShardLines) -> tuple[set[int] | None, Records]:
        """The jobs with ends and with records of images, and those of images in packs.

        None instead of the jobs if a look at each costs less.
        """
        keys = set[str]()
        async for shard, lines in ended:
            async for records in catalog.records_in(shard, lines, Damaged()):
                keys.update(record.key for record in self.add(records))
        jobs = {*self.outcomes}
        found = set[int]()
        self.outcomes.clear()
        own = [shard for shard in self.shards if shard.campaign in self._campaigns]
        packed = await packed_images(self.storage, own, keys)
        images = catalog.of_kind(self.shards, "images", "again")
        most = _FEW_ENDS + catalog.size_bytes(images) // _BYTES_OF_LOOK_UP
        if len(jobs) <= most:
            return None, packed
        async for records in catalog.records(
            catalog.of_kind(own, "images", "again"), Damaged()
        ):
            found |= jobs & {record.job for record in records}
        return found, packed

    async def without_unstored(self, records: Records) -> Records:
        """Leaves out images, of jobs that ended otherwise, which only a record tells of."""
        contested = [each for each in records if self.job(each) in self.outcomes]
        found = await metadata_of(self.storage, contested)
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

    def sent(self, records: Iterable[Record]) -> Records:
        """The records of jobs that are known to be sent; notes the others."""
        found = []
        for record in records:
            if self._known is None or is_sent(record, self._known):
                found.append(record)
            elif not was_changed(record, self._known):
                self.unknown.add(f"{record.id} {record.digest}")
                self.damaged.add(record.key, NOT_SENT)
        return found

    def add(self, records: Records) -> Records:
        """The first end of each job that ended without an image, and was not settled."""
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

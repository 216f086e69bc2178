"""Reads campaigns' records: every shard once, in order, with flat memory."""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Sequence,
)
from typing import ParamSpec

from imagefleet import concurrency
from imagefleet.job.message import RECORDS
from imagefleet.keeping.duplicates import Hashed, near_duplicates
from imagefleet.keeping.rule import Keep
from imagefleet.records import catalog, decisions, ledger
from imagefleet.records.catalog import Damaged, Positions, RecordParts, StoredShard
from imagefleet.records.counts import CachedCounts, Counts
from imagefleet.records.decisions import Ends, ImageRecords
from imagefleet.records.ledger import Digests, Ledger
from imagefleet.records.log import ShardName, Totals
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage

_Terms = ParamSpec("_Terms")

#: Campaigns that are counted at the same time.
_COUNTED_AT_ONCE = 64

#: Jobs in a ledger of 4 MiB: a campaign of more is counted by the ends of its shards, as is one
#: with more records of images, as long as they say no more than was sent.
_READ_ENTRIES = 2**18


async def campaigns(storage: Storage) -> AsyncIterator[str]:
    """The campaigns that have records, by name; listings of folders."""
    found = {name async for name in storage.blobs.folders(RECORDS)}
    found |= {name async for name in storage.files.folders(RECORDS)}
    found.update(await ledger.listed(storage))
    found.update(await catalog.packed_campaigns(storage) or ())
    for name in sorted(found):
        if ShardName.read(f"{RECORDS}{name}/-.jobs.jsonl.gz"):
            yield name


async def results(
    storage: Storage, campaign: str, outcomes: Collection[str], damaged: Damaged
) -> RecordParts:
    """A campaign's images, and then its jobs that ended without one, some at a time."""
    wanted = []
    if "completed" in outcomes:
        wanted.append(image_parts(storage, campaign, damaged))
    if set(outcomes) - {"completed"}:
        wanted.append(ended_parts(storage, campaign, damaged))
    for parts in wanted:
        async for records in parts:
            yield [record for record in records if record.outcome in outcomes]


async def drawings(
    storage: Storage, campaign: str, damaged: Damaged, rule: Keep | None = None
) -> RecordParts:
    """All that workers recorded of images; last of those whose names were taken.

    Without near-duplicates, and with a *rule* those that it keeps by their scores.
    """
    shards = await catalog.shards_of(storage, campaign, damaged)
    left_out = await _near_duplicates(Ends(storage, shards, None, Damaged()), shards)

    def kept(records: list[Record]) -> list[Record]:
        return [
            each
            for each in records
            if each.id not in left_out
            and not (rule is not None and rule.reason(each.scores))
        ]

    images = await ImageRecords(storage, shards, damaged, campaign).read()
    async for records in images.drawings("images", damaged):
        yield kept(records)
    yield kept(await images.unrecorded())
    async for records in images.drawings("again", Damaged()):  # counted by `read`
        yield kept(records)


async def end(storage: Storage, campaign: str) -> Positions:
    """The position of a follower that has read all there is now; a listing."""
    return {
        each.blob.name: each.blob.size_bytes
        for each in await catalog.shards_of(storage, campaign, packs=False)
    }


async def counts(
    storage: Storage, campaign: str, damaged: Damaged | None = None
) -> Counts:
    """A campaign's numbers: a listing, and a read for each shard.

    Of a large campaign the ends of the shards of images alone; but also the names of all images
    where some were taken, and all records where some were replaced, or more jobs have ended than
    were sent.
    """
    damaged = damaged or Damaged()
    shards = await catalog.shards_of(storage, campaign, damaged)
    return await _counts(storage, Ledger(storage, campaign), shards, damaged)


async def all_counts(
    storage: Storage, damaged: Damaged, before: dict[str, CachedCounts]
) -> dict[str, Counts]:
    """The numbers of all campaigns: of `counts`, with four listings for them all.

    Campaigns that have not changed since they were counted *before* are not read again; it takes in
    the others. To a ledger and a shard is only ever appended: names, sizes and times tell a change.
    """
    noted = await ledger.listed(storage)
    by_campaign: dict[str, list[StoredShard]] = {name: [] for name in noted}
    for shard in await catalog.shards_of(storage, None, damaged):
        by_campaign.setdefault(shard.campaign, []).append(shard)
    found = {}
    kept = {}

    async def count(campaign: str) -> None:
        blobs = noted.get(campaign, ())
        shards = by_campaign[campaign]
        unfit = Damaged()
        listed = [*blobs, *(shard.blob for shard in shards)]
        of_campaign = before.get(campaign)
        if of_campaign is None or of_campaign.listed != listed:
            of = Ledger(storage, campaign) if blobs else None
            counts = await _counts(storage, of, shards, unfit)
            of_campaign = CachedCounts(listed, counts, unfit.count)
            damaged.include(unfit)
        else:
            damaged.count += of_campaign.unfit
        found[campaign] = of_campaign.counts
        if not unfit.saw_images:  # whose names and bytes no listing of records tells
            kept[campaign] = of_campaign

    await concurrency.for_each(by_campaign, count, _COUNTED_AT_ONCE)
    before.clear()
    before.update(kept)
    return found


async def _counts(
    storage: Storage,
    noted: Ledger | None,
    shards: list[StoredShard],
    damaged: Damaged,
) -> Counts:
    sent = None if noted is None else await noted.count()
    image_bytes = catalog.size_bytes(catalog.of_kind(shards, "images"))
    is_short = image_bytes <= catalog.PART_BYTES and (sent or 0) <= _READ_ENTRIES
    is_exact = is_short or bool(catalog.of_kind(shards, "replaced", "distinct"))
    while True:
        known = None
        if noted is not None and sent is not None and is_exact:
            known = await noted.read()
            sent = len(
                known
            )  # writers that have not read each other count some jobs twice
        ends = Ends(storage, shards, known, unfit := Damaged())
        images = ImageRecords(storage, shards, unfit)
        add = _recounted if is_exact else _counted
        total = await add(ends, images)
        ended = total.jobs + len(ends.outcomes) + ends.discarded
        if is_exact or sent is None or ended <= sent:
            break
        is_exact = True  # what the ends of the shards say is not so
    damaged.include(unfit)
    by_outcome = Counter(ends.outcomes.values())
    changed = [shard.blob.modified_at or shard.blob.created_at for shard in shards]
    return Counts(
        sent=sent,
        images=total.records,
        completed=total.jobs,
        failed=by_outcome["failed"],
        cancelled=by_outcome["cancelled"],
        dropped=by_outcome["dropped"],
        discarded=ends.discarded,
        first_at=min(map(catalog.began_at, shards), default=None),
        last_at=max(changed, default=None),
        unknown=len(ends.unknown),
    )


async def image_parts(
    storage: Storage,
    campaign: str,
    damaged: Damaged | None = None,
    *,
    known: Digests | None = None,
    ended: set[int] | None = None,
) -> RecordParts:
    """Each stored image of a campaign once; a listing, and a read for each 4 MiB of records.

    With *known* only those of jobs that are known to be sent. *ended* takes in the jobs that ended
    otherwise.
    """
    damaged = damaged or Damaged()
    shards = await catalog.shards_of(storage, campaign, damaged)
    ends = await Ends(storage, shards, known, Damaged()).read()
    ends.damaged = damaged
    ended = set() if ended is None else ended
    ended.update(ends.outcomes)
    images = await ImageRecords(storage, shards, damaged, campaign).read()
    async for records in _each_once(ends, shards, images):
        found = [record for record in records if record.outcome == "completed"]
        ended.update(record.job for record in records if record.is_end)
        yield await ends.without_unstored(ends.sent(found))


async def ended_parts(
    storage: Storage,
    campaign: str | None = None,
    damaged: Damaged | None = None,
    *,
    job_id: str | None = None,
    known: Digests | None = None,
) -> RecordParts:
    """The jobs that ended without an image, and were not replayed, discarded or completed since.

    None: those of all campaigns. With *known* only those that are known to be sent.
    """
    damaged = damaged or Damaged()
    shards = await catalog.shards_of(storage, campaign, damaged)
    ends = Ends(storage, shards, known, damaged, job_id)
    await ends.read_settled()
    async for records in ends.records():
        yield records
    with_others = catalog.of_kind(shards, "again", "distinct")
    for named in sorted({shard.campaign for shard in with_others}):
        of_campaign = [shard for shard in shards if shard.campaign == named]
        images = await ImageRecords(storage, of_campaign, damaged).read()
        await images.find()
        async for records in images.left():
            yield ends.add(records)
        near = await _near_duplicates(ends, of_campaign)
        yield ends.add([*near.values()])


async def _near_duplicates(
    ends: Ends, shards: Sequence[StoredShard]
) -> dict[str, Record]:
    """The ends of a campaign's jobs whose images are near-duplicates of better ones, by their ids.

    Reads all records of its images, if there may be any.
    """
    if not catalog.of_kind(shards, "distinct"):
        return {}
    images = await ImageRecords(ends.storage, shards, Damaged()).read()
    records: dict[Hashed, Record] = {}
    async for some in images.each_once():
        for record in ends.sent(some):
            if (hashed := record.hashed) and not record.is_end:
                records[hashed] = record
    found = await asyncio.to_thread(near_duplicates, records)
    return {
        hashed.id: records[hashed].as_near_duplicate(better)
        for hashed, better in found.items()
    }


async def _each_once(
    ends: Ends, shards: Sequence[StoredShard], images: ImageRecords
) -> AsyncGenerator[list[Record]]:
    """Each image once, near-duplicates as the ends of their jobs, and jobs that failed."""
    near = await _near_duplicates(ends, shards)
    async for records in images.each_once():
        yield [near.get(record.id, record) for record in records]


def _singly(
    read: Callable[_Terms, RecordParts],
) -> Callable[_Terms, AsyncGenerator[Record]]:
    async def singly(
        *args: _Terms.args, **terms: _Terms.kwargs
    ) -> AsyncGenerator[Record]:
        async for records in read(*args, **terms):
            for record in records:
                yield record

    return singly


images = _singly(image_parts)
ended = _singly(ended_parts)


async def _counted(ends: Ends, images: ImageRecords) -> Totals:
    """The images and completed jobs by the ends of shards, and by the records of taken names."""
    await ends.read()
    ends.damaged.saw_images |= bool(catalog.of_kind(ends.shards, "again"))
    count = jobs = 0

    async def add(shard: StoredShard) -> None:
        nonlocal count, jobs
        found = await catalog.totals(shard, ends.damaged)
        count += found.records
        jobs += found.jobs

    shards = catalog.of_kind(ends.shards, "images")
    await concurrency.for_each(shards, add, catalog.CONCURRENT_READS)
    await images.read()
    jobs += await images.find()
    async for records in images.left():
        ends.add(records)
        for record in records:
            if record.outcome == "completed":
                count += 1
                jobs += images.again.completes(record)
    return Totals(count, jobs)


async def _recounted(ends: Ends, images: ImageRecords) -> Totals:
    """Images and completed jobs by all records; of jobs that ended otherwise, by what is stored."""
    await ends.read_settled()
    async for records in catalog.records_of(ends.shards, "jobs", ends.damaged):
        ends.add(records)
    await images.read()
    count = 0
    completed = set[int]()
    contested = dict[int, Record]()
    async for records in _each_once(ends, ends.shards, images):
        ends.add(records)
        drawn = [record for record in records if record.outcome == "completed"]
        for record in ends.sent(drawn):
            if (job := ends.job(record)) in ends.outcomes:
                if record.stage == record.stages or job not in contested:
                    contested[job] = record
                continue
            count += 1
            if images.again.completes(record):
                completed.add(job)
    has_taken_names = bool(catalog.of_kind(ends.shards, "again"))
    ends.damaged.saw_images |= has_taken_names or bool(contested)
    for record, found in await decisions.stored_of(ends.storage, contested.values()):
        count += len(found)
        if decisions.are_all(found):
            completed.add(ends.job(record))
    for job in completed:
        ends.complete(job)
    return Totals(count, len(completed))

"""Which records decide: each image's one, and each job's first end that nobody has settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Self

from imagefleet import concurrency
from imagefleet.records import stored
from imagefleet.records.once import Again, Replaced, Rivals
from imagefleet.records.record import Outcome, Record
from imagefleet.records.sent import HASH_BYTES, Digests, id_hash
from imagefleet.records.stored import Damaged, StoredShard


async def images(
    shards: Collection[StoredShard], again: Again, replaced: Replaced, damaged: Damaged
) -> AsyncGenerator[list[Record]]:
    """The record of each image once, and last the jobs that failed for a taken name."""
    drawn = stored.of_kind(shards, "images")
    rivals = Rivals()
    async for _, lines in stored.lines_of_all(drawn, Damaged()):
        await asyncio.to_thread(rivals.note, lines)
    async with aclosing(stored.records(drawn, damaged)) as parts:
        async for part in parts:
            records = replaced.without(part, once=True)
            records = await _without_rivals(shards, records, rivals, damaged)
            again.found(records)
            yield records
    async with aclosing(left(shards, again, replaced)) as parts:
        async for records in parts:
            yield records


async def again(shards: Collection[StoredShard], damaged: Damaged) -> tuple[Again, Replaced]:
    """What the records of taken names and the notes of replaced drawings say."""
    again, replaced = Again(), Replaced()
    async for notes in stored.records(stored.of_kind(shards, "replaced"), damaged):
        replaced.add(notes)
    async for part in stored.records(stored.of_kind(shards, "again"), damaged):
        again.add(replaced.without(part, once=False))
    return again, replaced


async def told_apart(shard: StoredShard, records: list[Record]) -> list[Record]:
    """Records of taken names; those of another job than the stored image's are failed jobs."""
    found = await _metadata([shard], records)
    of = [(record, found.get(record.blob, {})) for record in records]
    return [
        record if record.fits(metadata, of_any_drawing=True) else record.name_taken(metadata)
        for record, metadata in of
    ]


async def find(shards: Collection[StoredShard], again: Again) -> int:
    """Finds the records of images whose names were taken; counts the jobs that others completed."""
    jobs = 0
    drawn = stored.of_kind(shards, "images") if again else []
    async with aclosing(stored.lines_of_all(drawn, Damaged())) as parts:
        async for shard, lines in parts:
            found = await asyncio.to_thread(again.find, lines)
            records = stored.parsed(found, shard, Damaged())
            again.found(records)
            jobs += sum(again.completes(record) > record.completes_job for record in records)
    return jobs


async def left(
    shards: Collection[StoredShard], again: Again, replaced: Replaced
) -> AsyncGenerator[list[Record]]:
    """Of names that were taken: images without another record, and jobs that failed for it."""
    taken = stored.of_kind(shards, "again") if again else []
    async with aclosing(stored.records(taken, Damaged())) as parts:
        async for part in parts:
            records = replaced.without(part, once=False)
            # A worker that died in between has stored these images, and written no record.
            found = await _metadata(shards, filter(again.is_left, records))
            left = []
            for record in records:
                metadata = found.get(record.blob, {})
                if again.is_missing(record) and record.fits(metadata, of_any_drawing=True):
                    again.found([record])
                    left.append(record)
                elif again.take(record):
                    left.append(record.name_taken(metadata))
            yield left


async def _without_rivals(
    shards: Collection[StoredShard], records: list[Record], rivals: Rivals, damaged: Damaged
) -> list[Record]:
    """Of records with the same name, the first that fits the stored image."""
    found = await _metadata(shards, filter(rivals.include, records)) if rivals else {}
    kept = []
    for record in records:
        if (metadata := found.get(record.blob)) is None:
            kept.append(record)
        elif not record.fits(metadata):
            damaged.add(record.blob or "", "a record of another image than the one that is stored")
        elif rivals.take(record):
            kept.append(record)
    return kept


async def _metadata(
    shards: Collection[StoredShard], records: Iterable[Record]
) -> dict[str | None, Mapping[str, str]]:
    """The metadata of these records' images; of one that is gone there is none."""
    found: dict[str | None, Mapping[str, str]] = {}

    async def look(blob: str) -> None:
        found[blob] = await store.metadata(blob) or {}

    store = next(shard.store for shard in shards if shard.kind in {"images", "again"})
    names = {record.blob for record in records if record.blob}
    await concurrency.for_each(names, look, stored.CONCURRENT_READS)
    return found


class Ends:
    """The jobs that ended without all of their images, each once; those replayed since are none."""

    def __init__(self, known: Digests | None, damaged: Damaged) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._settled: set[int] = set()
        self._known = known
        self._damaged = damaged

    @classmethod
    async def open(
        cls, shards: Iterable[StoredShard], known: Digests | None, damaged: Damaged
    ) -> Self:
        """Reads what the operator has replayed and discarded; only *known* jobs count, if given."""
        ends = cls(known, damaged)
        async for records in stored.records(stored.of_kind(shards, "settled"), damaged):
            ends._settled.update(record.failure for record in records)
            discarded = {record.job: record.outcome for record in ends.sent(records)}
            ends.outcomes |= {job: each for job, each in discarded.items() if each == "discarded"}
        return ends

    def sent(self, records: list[Record]) -> list[Record]:
        """Those of jobs that were sent; what could not be read has no digest, a stage its own."""
        if (known := self._known) is None:
            return records
        found = []
        for record in records:
            digest = known.get(id_hash(record.id))
            is_of_stage = record.outcome == "completed" and record.stage < record.stages
            if record.digest and not is_of_stage:
                is_sent = digest == bytes.fromhex(record.digest)[:HASH_BYTES]
            else:
                is_sent = digest is not None
            if is_sent:
                found.append(record)
            else:
                self._damaged.add(record.key, "a record of a job that was not sent")
        return found

    def add(self, records: list[Record]) -> list[Record]:
        """The first end of each job that has failed or was cancelled, and not been settled."""
        new = []
        ended = [record for record in records if record.outcome in {"failed", "cancelled"}]
        for record in self.sent(ended):
            is_settled = record.failure in self._settled
            if not is_settled and self.outcomes.get(record.job, "discarded") == "discarded":
                self.outcomes[record.job] = record.outcome
                new.append(record)
        return new

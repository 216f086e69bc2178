"""Which new records are handed on: those of jobs that were sent, and that fit what is stored."""

import contextlib
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from imagefleet import errors
from imagefleet.records import drawn, stored
from imagefleet.records.once import Replaced
from imagefleet.records.record import Record
from imagefleet.records.sent import Ledgers
from imagefleet.records.stored import Damaged, StoredShard
from imagefleet.storage.protocol import BlobStore

#: A load notes its jobs as sent a little later: until then, a record of one waits so long.
_UNNOTED_SECONDS = 60.0


class New(NamedTuple):
    """A record, and the part of a shard that it comes from."""

    record: Record
    shard: StoredShard
    offset: int = 0


@dataclass(slots=True)
class Checks:
    """Holds new records to what is stored, and to what was sent if that is noted."""

    blobs: BlobStore
    ledgers: Ledgers
    damaged: Damaged
    own: Container[str] | None = None
    """The only jobs that count, by key; what is stored of one takes the place of its end."""
    trusts_images: bool = False
    """Whether images are not looked at."""
    waiting: list[New] = field(default_factory=list)
    """Those of jobs that may be noted as sent any moment."""

    async def fitting(
        self, new: Iterable[New], shards: Collection[StoredShard]
    ) -> list[Record]:
        """Those that fit, of all that waited, too; *shards*: with the notes of replaced images."""
        sent, trusted, waiting, read = (
            list[New](),
            list[Record](),
            list[New](),
            set[str](),
        )
        now = self.blobs.clock.now()
        for each in (*self.waiting, *new):
            record, ledger = each.record, self.ledgers.of(each.record.campaign)
            if self.own is None and each.shard.kind != "settled":
                if (
                    not drawn.is_sent(record, ledger.known)
                    and record.campaign not in read
                ):
                    read.add(record.campaign)
                    with contextlib.suppress(
                        errors.SetupError
                    ):  # no permission to read files
                        await ledger.read()
                if ledger.known and not drawn.is_sent(record, ledger.known):
                    if abs((now - record.at).total_seconds()) < _UNNOTED_SECONDS:
                        waiting.append(each)
                    else:
                        self.damaged.add(record.key, drawn.NOT_SENT)
                    continue
            if self.trusts_images and each.shard.kind == "images":
                trusted.append(record)
            elif self.own is None or record.key in self.own:
                sent.append(each)
        found = await self._stored(sent, shards)
        self.waiting = waiting
        return trusted + found

    async def _stored(
        self, new: list[New], shards: Collection[StoredShard]
    ) -> list[Record]:
        images = [each for each in new if each.record.outcome == "completed"]
        names = (each.record.blob for each in images)
        told = await drawn.metadata_of([each.shard for each in images], names)
        ends = [
            each.record for each in new if each.record.is_end or each.record.completes
        ]
        of_jobs = {
            each.job: some for each, some in await drawn.stored_of(self.blobs, ends)
        }
        found, misfits = list[Record](), list[tuple[Record, str]]()
        for record, shard, _ in new:
            of_image, of_job = told.get(record.blob, {}), of_jobs.get(record.job, [])
            is_again = shard.kind == "again"
            if is_again and not record.fits(of_image, of_any_drawing=True):
                found.append(record.name_taken(of_image))
            elif not (why := _misfit(record, of_image, of_job, is_again)):
                found.append(record)
            elif record.is_end and self.own is not None:
                found += of_job
            else:
                misfits.append((record, why))
        replaced = Replaced()
        notes = stored.of_kind(shards if misfits else (), "replaced")
        async for some in stored.records(notes, Damaged()):
            replaced.add(some)
        for record, why in misfits:
            if replaced.without([record], once=False):
                self.damaged.add(record.blob or record.key, why)
        return found


def _misfit(
    record: Record, of_image: Mapping[str, str], of_job: list[Record], is_again: bool
) -> str:
    if record.is_end:
        return (
            "the end of a job of which all is stored" if drawn.are_all(of_job) else ""
        )
    if record.outcome == "completed":
        if not of_image or (record.completes and not drawn.are_all(of_job)):
            return "a record of an image that is not stored"
        # A worker that finds a name taken may not read what has it.
        if not record.fits(of_image) and (record.sha256 or not is_again):
            return drawn.ANOTHER
    return ""

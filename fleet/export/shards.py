"""Makes the shards of a plan, one after the other, each complete or absent.

A shard is written into a folder of its own, moved into place, and noted as done; after a run that
is killed in between it is made again, which comes out the same.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.console import Move
from fleet.export.formats import Sample, ShardWriter
from fleet.export.plan import WORK_FOLDER, ExportPlan, PlanDatabase, Shard
from fleet.results import download
from fleet.results.credentials import Credentials
from imagefleet import concurrency
from imagefleet.files import picture, safetensors
from imagefleet.records import columns, pictures
from imagefleet.records.pictures import Fault, Picture
from imagefleet.records.record import Record
from imagefleet.storage.local.blobs import sync
from imagefleet.storage.open import Storage
from imagefleet.submit import RETRIES

#: Images read while as many others are written, some 40 MB.
_BATCH = 64


@dataclass
class _Contents:
    """The contents of a shard, as it is filled."""

    images: int = 0
    bytes: int = 0
    faulty: dict[Fault, list[str]] = field(
        default_factory=lambda: {"missing": [], "misfit": []}
    )
    misfits: int = 0


@dataclass(frozen=True)
class Exporter:
    folder: Path
    database: PlanDatabase
    plan: ExportPlan
    storage: Storage
    signs: Credentials | None = None

    async def run(self, on_images: Move) -> list[Shard]:
        """Makes the shards that are not there yet, and copies the packs; returns all."""
        done = {}

        async def make(work: tuple[int, list[Record] | None]) -> None:
            number, of_pack = work
            shard = self._finished(number)
            if shard is None and of_pack is None:
                shard = await self._make(number, on_images)
            else:
                shard = shard or await self._copy(of_pack or [])
                on_images(shard.images + len(shard.missing) + len(shard.changed))
            self.database.note(number, shard)
            done[number] = shard

        count = self.plan.shard_count - self.plan.packs
        for number in range(count):
            await make((number, None))
        await concurrency.for_each(
            enumerate(self.database.packs(), count), make, download.CONCURRENT_PACKS
        )
        return [done[number] for number in sorted(done)]

    async def _copy(self, records: list[Record]) -> Shard:
        """Copies a pack, without pictures that none of its *records* is of."""
        draft = self._draft(str(records[0].pack).rpartition("/")[2])
        contents = _Contents()
        _, faults = await RETRIES.call(
            lambda: download.copy_pack(self.storage, records, draft)
        )
        for blob, fault in faults.items():
            contents.faulty[fault].append(blob)
        sizes = {str(each.blob): each.size_bytes or 0 for each in records}
        contents.images = len(sizes) - len(faults)
        contents.bytes = sum(sizes[blob] for blob in sizes.keys() - faults.keys())
        if not contents.images:
            self._writer(draft).close()  # an empty one
        return await asyncio.to_thread(self._complete, draft, contents)

    def _finished(self, number: int) -> Shard | None:
        """The shard if it was noted as done, and is there; else None."""
        shard = self.database.done(number)
        return shard if shard and shard.is_in(self.folder) else None

    async def _make(self, number: int, on_images: Move) -> Shard:
        draft = self._draft(f"{number:05}.tar")
        # As img2dataset makes them.
        digits = max(4, len(str(self.plan.shard_size - 1)))
        keys = (f"{number:05}{place:0{digits}}" for place in itertools.count())
        images = self.database.records(number, self.plan.shard_size)
        keyed = zip(keys, images, strict=False)
        contents = _Contents()
        written = self._writer(draft)
        try:
            fetched: Sequence[Sample] = []
            while batch := list(itertools.islice(keyed, _BATCH)):
                # The next images are read while these are written.
                fetched, _ = await concurrency.gather(
                    self._fetch(batch, contents),
                    asyncio.to_thread(written.write, fetched),
                )
                on_images(len(batch))
            await asyncio.to_thread(written.write, fetched)
        finally:
            await asyncio.to_thread(written.close)
        return await asyncio.to_thread(self._complete, draft, contents)

    async def _fetch(
        self, batch: Sequence[tuple[str, list[Record]]], contents: _Contents
    ) -> list[Sample]:
        turn = asyncio.Semaphore(download.CONCURRENCY)

        async def find(records: Sequence[Record]) -> Picture | Fault:
            return await RETRIES.call(lambda: pictures.find(self.storage, records))

        async def read(records: list[Record]) -> tuple[Picture | Fault, int]:
            """The image, and how many of its records are of no picture that is stored."""
            async with turn:
                found = await find(records)
                if isinstance(found, str):
                    return found, len(records) if found == "misfit" else 0
                if await asyncio.to_thread(picture.decode, found.data) is None:
                    return "misfit", 0  # as recorded, and no image
                others = [
                    await find([each]) for each in records if each is not found.record
                ]
                misfits = others.count("misfit")
                if self.signs is None:
                    return found, misfits
                return await asyncio.to_thread(self.signs.sign, found), misfits

        samples = []
        reads = await concurrency.gather(*(read(records) for _, records in batch))
        for (key, records), (found, misfits) in zip(batch, reads, strict=True):
            contents.misfits += misfits
            if isinstance(found, str):
                contents.faulty[found].append(records[0].blob or "")
                continue
            samples.append(Sample(key, found.record, found.data))
            contents.images += 1
            contents.bytes += len(found.data)
        return samples

    def _writer(self, draft: Path) -> ShardWriter:
        return ShardWriter(
            draft,
            beside_packs=self.plan.packs > 0,
            address=columns.addresses(self.storage),
        )

    def _draft(self, name: str) -> Path:
        """Where a shard is written until it is complete."""
        draft = self.folder / WORK_FOLDER / "draft" / name
        draft.parent.mkdir(parents=True, exist_ok=True)
        return draft

    def _complete(self, draft: Path, contents: _Contents) -> Shard:
        """Flushes a finished shard to the disk, moves it into place, and describes it."""
        sync(draft)
        shard = Shard(
            file=draft.name,
            file_bytes=draft.stat().st_size,
            sha256=safetensors.sha256_of(draft),
            images=contents.images,
            bytes=contents.bytes,
            missing=contents.faulty["missing"],
            changed=contents.faulty["misfit"],
            misfits=contents.misfits,
        )
        draft.replace(self.folder / draft.name)
        sync(self.folder)
        return shard

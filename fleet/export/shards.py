"""Makes the shards of a plan, one after the other, each complete or absent.

A shard is written into a folder of its own, read back and compared, moved into place, and noted as
done; after a run that is killed in between it is made again, which comes out the same.
"""

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli import files
from fleet.export.formats import (
    METADATA,
    Imagefolder,
    Parquet,
    Sample,
    ShardFiles,
    Webdataset,
)
from fleet.export.plan import WORK, File, Plan, Shard, Work
from fleet.results import download
from imagefleet import concurrency, errors
from imagefleet.files import picture
from imagefleet.records import pictures
from imagefleet.records.pictures import Fault, Picture
from imagefleet.records.record import Record
from imagefleet.storage.local.new_blobs import sync
from imagefleet.storage.protocol import BlobStore
from imagefleet.submit import RETRIES

#: Images read while as many others are written, some 40 MB.
_BATCH = 64

_FORMATS: Mapping[str, Callable[..., ShardFiles]] = {
    "webdataset": Webdataset,
    "parquet": Parquet,
    "imagefolder": Imagefolder,
}


@dataclass(frozen=True, slots=True)
class Exporter:
    folder: Path
    work: Work
    plan: Plan
    blobs: BlobStore

    async def run(self, on_images: Callable[[int], None]) -> list[Shard]:
        """Makes those that are not there yet; returns all."""
        done = []
        for number in range(self.plan.shard_count):
            if (shard := self._finished(number)) is None:
                shard = await self._make(number, on_images)
            else:
                on_images(shard.images + len(shard.missing) + len(shard.changed))
            done.append(shard)
        return done

    def _finished(self, number: int) -> Shard | None:
        """The shard if it was noted as done, and is there; else None."""
        shard = self.work.done(number)
        noted = shard.files if shard else {}
        is_there = all(
            files.size_of(self.folder / name) == file.bytes
            for name, file in noted.items()
        )
        return shard if is_there else None

    async def _make(self, number: int, on_images: Callable[[int], None]) -> Shard:
        draft = self.folder / WORK / f"{number:05}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        # As img2dataset makes them.
        digits = max(4, len(str(self.plan.shard_size - 1)))
        keys = (f"{number:05}{place:0{digits}}" for place in itertools.count())
        form = _FORMATS[self.plan.format]
        written = form(draft, number, self.plan.shard_count, self.blobs.address)
        try:
            fetched: Sequence[Sample] = []
            keyed = zip(
                keys, self.work.records(number, self.plan.shard_size), strict=False
            )
            while batch := list(itertools.islice(keyed, _BATCH)):
                # The next images are read while these are written.
                fetched, _ = await concurrency.gather(
                    self._fetch(batch), asyncio.to_thread(written.add, fetched)
                )
                on_images(len(batch))
            await asyncio.to_thread(written.add, fetched)
        finally:
            await asyncio.to_thread(written.close)
        shard = await asyncio.to_thread(self._complete, written)
        await asyncio.to_thread(self._move, written)
        self.work.note(number, shard)
        return shard

    async def _fetch(self, batch: Sequence[tuple[str, list[Record]]]) -> list[Sample]:
        turn = asyncio.Semaphore(download.CONCURRENCY)

        async def find(records: Sequence[Record]) -> Picture | Fault:
            return await RETRIES.call(lambda: pictures.find(self.blobs, records))

        async def read(key: str, records: list[Record]) -> Sample:
            async with turn:
                found = await find(records)
                if isinstance(found, str):
                    count = len(records) if found == "misfit" else 0
                    return Sample(key, records[0], None, found, count)
                if await asyncio.to_thread(picture.decode, found.data) is None:
                    return Sample(
                        key, found.record, None, "misfit", 0
                    )  # as recorded, and no image
                others = [
                    await find([each]) for each in records if each is not found.record
                ]
                return Sample(
                    key, found.record, found.data, None, others.count("misfit")
                )

        return list(await concurrency.gather(*(read(*each) for each in batch)))

    def _complete(self, written: ShardFiles) -> Shard:
        """Compares what was written, and has it on the disk."""
        if list(written.read_digests()) != written.digests:
            raise errors.TransientError(
                f"shard {written.name} was read back from {self.folder} other than it was written:"
                " check the disk, and run the same command again"
            )
        if self.plan.format == "imagefolder":
            os.sync()  # of thousands of files one by one would take longer
        for path in written.listed:
            sync(path)
        return Shard(
            name=written.name,
            images=len(written.digests),
            bytes=written.bytes,
            files={
                str(path.relative_to(written.folder)): File(
                    bytes=path.stat().st_size, sha256=files.sha256(path)
                )
                for path in written.listed
            },
            missing=written.faulty["missing"],
            changed=written.faulty["misfit"],
            misfits=written.misfits,
        )

    def _move(self, written: ShardFiles) -> None:
        """Moves a shard into place, over what a run that was killed has moved of it."""
        for path in written.listed:
            # An image folder is moved as a whole.
            source = path.parent if path.name == METADATA else path
            target = self.folder / source.relative_to(written.folder)
            target.parent.mkdir(exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            source.replace(target)
            sync(target.parent)
        shutil.rmtree(written.folder)

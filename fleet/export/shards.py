"""Makes the shards of a plan, one after the other, each complete or absent.

A shard is written into a folder of its own, read back and compared, noted as done, and moved into
place; a run that is killed in between moves the rest, or makes the shard again, which comes out the
same.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.export.formats import METADATA, Imagefolder, Parquet, Sample, ShardFiles, Webdataset
from fleet.export.plan import WORK, File, Plan, Shard, Work
from fleet.results import download, files
from imagefleet import concurrency, errors
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore

#: Images read while as many others are written, some 40 MB.
_BATCH = 64

_FORMATS: Mapping[str, Callable[[Path, int, int], ShardFiles]] = {
    "webdataset": Webdataset,
    "parquet": Parquet,
    "imagefolder": Imagefolder,
}


@dataclass(frozen=True, slots=True)
class Exporter:
    """Makes the shards of *plan* in *folder*."""

    folder: Path
    work: Work
    plan: Plan
    blobs: BlobStore

    async def run(self, on_images: Callable[[int], None]) -> list[Shard]:
        """Makes those that are not there yet; returns all."""
        done = []
        for number in range(self.plan.shards):
            if (shard := self._finished(number)) is None:
                shard = await self._make(number, on_images)
            else:
                on_images(shard.images + len(shard.missing) + len(shard.changed))
            done.append(shard)
        return done

    def _files(self, number: int) -> ShardFiles:
        draft = self.folder / WORK / f"{number:05}"
        return _FORMATS[self.plan.format](draft, number, self.plan.shards)

    def _finished(self, number: int) -> Shard | None:
        """The shard if it was noted as done, moved into place; else None."""
        if (note := self.work.done(number)) is None:
            return None
        shard = Shard.model_validate_json(note)
        self._move(self._files(number))
        sizes = {name: files.size_of(self.folder / name) for name in shard.files}
        is_there = sizes == {name: file.bytes for name, file in shard.files.items()}
        return shard if is_there else None

    async def _make(self, number: int, on_images: Callable[[int], None]) -> Shard:
        written = self._files(number)
        shutil.rmtree(written.folder, ignore_errors=True)
        written.folder.mkdir(parents=True)
        written.open(self.blobs.address)
        counted = _Counted()
        try:
            fetched: Sequence[Sample] = []
            keyed = self._keyed(number)
            while batch := list(itertools.islice(keyed, _BATCH)):
                # The next images are read while these are written.
                fetched, _ = await concurrency.gather(
                    self._fetch(batch), asyncio.to_thread(counted.write, written, fetched)
                )
                on_images(len(batch))
            await asyncio.to_thread(counted.write, written, fetched)
        finally:
            await asyncio.to_thread(written.close)
        shard = await asyncio.to_thread(self._complete, written, counted)
        self.work.note(number, shard.model_dump_json())
        await asyncio.to_thread(self._move, written)
        return shard

    async def _fetch(self, batch: Sequence[tuple[str, Record]]) -> list[Sample]:
        turn = asyncio.Semaphore(download.CONCURRENCY)

        async def read(key: str, record: Record) -> Sample:
            async with turn:
                data, fault = await download.read(self.blobs, record)
            return Sample(key, record, None if fault else data, fault)

        return list(await concurrency.gather(*(read(*each) for each in batch)))

    def _keyed(self, number: int) -> Iterator[tuple[str, Record]]:
        """The records with keys as img2dataset makes them."""
        digits = max(4, len(str(self.plan.shard_size - 1)))
        for place, record in enumerate(self.work.records(number, self.plan.shard_size)):
            yield f"{number:05}{place:0{digits}}", record

    def _complete(self, written: ShardFiles, counted: _Counted) -> Shard:
        """Compares what was written, and has it on the disk."""
        if list(written.digests()) != counted.digests:
            raise errors.TransientError(
                f"shard {written.stem} was read back from {self.folder} other than it was written:"
                " check the disk, and run the same command again"
            )
        entries = [written.folder / entry for entry in written.entries]
        if any(each.is_dir() for each in entries):
            os.sync()  # of thousands of files one by one would take longer
        listed = [each / METADATA if each.is_dir() else each for each in entries]
        for each in listed:
            files.sync(each)
        return Shard(
            name=written.stem,
            images=len(counted.digests),
            bytes=counted.bytes,
            files={
                str(each.relative_to(written.folder)): File(
                    bytes=each.stat().st_size, sha256=files.sha256(each)
                )
                for each in listed
            },
            missing=counted.missing,
            changed=counted.changed,
        )

    def _move(self, written: ShardFiles) -> None:
        """Moves what is still in the draft of a shard that is done."""
        for entry in written.entries:
            source, target = written.folder / entry, self.folder / entry
            if not source.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            source.replace(target)
            files.sync(target.parent)
        shutil.rmtree(written.folder, ignore_errors=True)


@dataclass(slots=True)
class _Counted:
    """What was written of a shard."""

    digests: list[str] = field(default_factory=list)
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def write(self, to: ShardFiles, samples: Sequence[Sample]) -> None:
        if samples:
            to.add(samples)
        for sample in samples:
            if sample.fault is not None:
                faulty = self.missing if sample.fault == "missing" else self.changed
                faulty.append(sample.record.blob or "")
            elif sample.sha256 is not None:
                self.digests.append(sample.sha256)
                self.bytes += len(sample.data or b"")

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fleet.export import formats, imagefolder, parquet, plan, sample, webdataset
from fleet.export.imagefolder import METADATA
from fleet.export.manifest import File, Shard
from fleet.export.plan import WORK, Plan
from fleet.results import files, images
from imagefleet import concurrency, errors
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore

#: Images read while as many others are written, some 40 MB.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Exporter:
    """Makes the shards of *plan* in *folder*."""

    folder: Path
    plan: Plan
    blobs: BlobStore

    @property
    def format(self) -> formats.ShardFormat:
        return format_of(self.plan)

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

    def _finished(self, number: int) -> Shard | None:
        """The shard if it was noted as done, moved into place; else None."""
        try:
            shard = Shard.model_validate_json(self._note(number).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        self._move(number)
        sizes = {name: files.size_of(self.folder / name) for name in shard.files}
        is_there = sizes == {name: file.bytes for name, file in shard.files.items()}
        return shard if is_there else None

    async def _make(self, number: int, on_images: Callable[[int], None]) -> Shard:
        draft = self._draft(number)
        await asyncio.to_thread(_empty, draft)
        writer = self.format.writer(draft, number, self.blobs.address)
        shard = _Counted(f"{number:05}")
        try:
            fetched: Sequence[sample.Sample] = []
            for batch in _batches(self._keyed(number)):
                # The next images are read while these are written.
                fetched, _ = await concurrency.gather(
                    self._fetch(batch), asyncio.to_thread(shard.write, writer, fetched)
                )
                on_images(len(batch))
            await asyncio.to_thread(shard.write, writer, fetched)
        finally:
            await asyncio.to_thread(writer.close)
        return await asyncio.to_thread(self._complete, number, shard)

    async def _fetch(self, batch: Sequence[tuple[str, Record]]) -> list[sample.Sample]:
        turn = asyncio.Semaphore(images.CONCURRENCY)

        async def read(key: str, record: Record) -> sample.Sample:
            async with turn:
                image = await images.read(self.blobs, record)
            return await asyncio.to_thread(sample.of, key, record, image)

        return list(await concurrency.gather(*(read(*each) for each in batch)))

    def _keyed(self, number: int) -> Iterator[tuple[str, Record]]:
        for place, record in enumerate(plan.records_of(self.folder, number)):
            yield formats.key_of(number, place, self.plan.shard_size), record

    def _complete(self, number: int, counted: _Counted) -> Shard:
        """Compares what was written, notes the shard as done, and moves it into place."""
        draft = self._draft(number)
        if list(self.format.digests(draft, number)) != counted.digests:
            raise errors.TransientError(
                f"shard {counted.name} was read back from {self.folder} other than it was written:"
                " check the disk, and run the same command again"
            )
        entries = [draft / entry for entry in self.format.entries(number)]
        if any(each.is_dir() for each in entries):
            os.sync()  # of thousands of files one by one would take longer
        listed = [each / METADATA if each.is_dir() else each for each in entries]
        for each in listed:
            files.sync(each)
        shard = Shard(
            name=counted.name,
            images=len(counted.digests),
            bytes=counted.bytes,
            files={
                str(each.relative_to(draft)): File(
                    bytes=each.stat().st_size, sha256=formats.sha256_of(each)
                )
                for each in listed
            },
            missing=counted.missing,
            changed=counted.changed,
        )
        with files.whole(self._note(number)) as note:
            note.write_text(shard.model_dump_json(), encoding="utf-8")
        self._move(number)
        return shard

    def _move(self, number: int) -> None:
        """Moves what is still in the draft of a shard that is done."""
        draft = self._draft(number)
        for entry in self.format.entries(number):
            source, target = draft / entry, self.folder / entry
            if not source.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            source.replace(target)
            files.sync(target.parent)
        shutil.rmtree(draft, ignore_errors=True)

    def _draft(self, number: int) -> Path:
        return self.folder / WORK / f"{number:05}"

    def _note(self, number: int) -> Path:
        return self.folder / WORK / f"{number:05}.done.json"


def format_of(plan: Plan) -> formats.ShardFormat:
    """The format of an export; raises SetupError if its library is not installed."""
    if plan.format == "webdataset":
        return webdataset.Webdataset()
    if plan.format == "imagefolder":
        return imagefolder.Imagefolder()
    return parquet.Parquet(plan.shards)


class _Counted:
    """What was written of a shard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.digests: list[str] = []
        self.bytes = 0
        self.missing: list[str] = []
        self.changed: list[str] = []

    def write(self, writer: formats.ShardWriter, samples: Sequence[sample.Sample]) -> None:
        if samples:
            writer.add(samples)
        for each in samples:
            if each.sha256 is not None:
                self.digests.append(each.sha256)
                self.bytes += len(each.data or b"")
            elif each.fault is not None:
                (self.missing if each.fault == "missing" else self.changed).append(each.blob)


def _batches(keyed: Iterable[tuple[str, Record]]) -> Iterator[list[tuple[str, Record]]]:
    rest = iter(keyed)
    while batch := list(itertools.islice(rest, _BATCH)):
        yield batch


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

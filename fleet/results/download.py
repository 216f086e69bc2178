"""Reads images by their records, and downloads them; what is there already is not read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fleet import console
from fleet.results import files
from imagefleet import concurrency, errors
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore
from imagefleet.submit import RETRIES

#: Reads at the same time: an image has some 400 KB.
CONCURRENCY = 32

Fault = Literal["missing", "changed"]


async def read(blobs: BlobStore, record: Record) -> tuple[bytes | None, Fault | None]:
    """The image of a record; with a fault, None or not what a worker has stored."""
    assert record.blob is not None  # noqa: S101 - every record of an image names it
    name = record.blob
    try:
        data = await RETRIES.call(lambda: blobs.read(name, MAX_IMAGE_BYTES))
    except errors.UnusableFileError:  # larger than any image
        return None, "changed"
    if data is None:
        return None, "missing"
    return data, None if record.size_bytes in {None, len(data)} else "changed"


#: The most names of images that are not there which are shown.
_SHOWN = 10


@dataclass(slots=True)
class Downloaded:
    """What a download has done."""

    images: int = 0
    bytes: int = 0
    already_there: int = 0
    changed: int = 0
    """Images of another size than recorded: drawn again since, or edited."""
    missing: int = 0
    first_missing: list[str] = field(default_factory=list)


@contextmanager
def opened(folder: Path, blobs: BlobStore) -> Iterator[Download]:
    """A download into *folder*, which no other process writes to meanwhile."""
    with files.writing(folder), console.only_one(folder, f"{folder} is being downloaded to"):
        folder.mkdir(parents=True, exist_ok=True)
        yield Download(folder, blobs, files.ignores_case(folder))


@dataclass(frozen=True, slots=True)
class Download:
    """Images on their way into a folder, some at once."""

    folder: Path
    blobs: BlobStore
    ignores_case: bool
    done: Downloaded = field(default_factory=Downloaded)

    async def run(self, records: Iterable[Record], on_image: Callable[[], None]) -> None:
        """Downloads the images of *records*."""

        async def fetch(record: Record) -> None:
            await self._fetch(record)
            on_image()

        await concurrency.for_each(records, fetch, CONCURRENCY)

    async def _fetch(self, record: Record) -> None:
        blob = record.blob or ""
        name = blob.rpartition("/")[2]
        path = self.folder / (files.without_case(name) if self.ignores_case else name)
        if record.size_bytes is not None and files.size_of(path) == record.size_bytes:
            self.done.already_there += 1
            return
        data, fault = await read(self.blobs, record)
        if data is None:
            self.done.missing += 1
            if len(self.done.first_missing) < _SHOWN:
                self.done.first_missing.append(blob)
            return
        await asyncio.to_thread(_write, path, data)
        self.done.images += 1
        self.done.bytes += len(data)
        self.done.changed += fault == "changed"


def _write(path: Path, data: bytes) -> None:
    # Not synced: a file that a power failure has emptied is not of its size. Images' names do not
    # begin with a dot, and what a kill leaves is written over by the next download.
    draft = path.with_name(f".{path.name}.partial")
    draft.write_bytes(data)
    draft.replace(path)

"""Downloads the pictures of records; what is there already is not read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cli import console, files
from imagefleet import concurrency
from imagefleet.records import pictures
from imagefleet.records.catalog import Damaged
from imagefleet.records.record import Record, hashed
from imagefleet.storage.protocol import BlobStore
from imagefleet.submit import RETRIES

#: Reads at the same time: an image has some 400 KB.
CONCURRENCY = 32

#: The most names of images without a picture which are shown.
SHOWN = 10


def report_undelivered(names_by_fault: Mapping[str, tuple[int, Sequence[str]]]) -> None:
    """Prints how many images have which fault, and the first of their names."""
    for what, (count, names) in names_by_fault.items():
        if count:
            more = f" and {count - SHOWN:,} more" if count > SHOWN else ""
            console.print_error(
                f"{console.counted(count, 'image')} {what}: {', '.join(names[:SHOWN])}{more}"
            )


@contextmanager
def opened(folder: Path, blobs: BlobStore, unfit: Damaged) -> Iterator[Download]:
    """A download into *folder*, which no other process writes to; counts what is *unfit*."""
    with (
        files.writing(folder),
        console.only_one(folder, f"{folder} is being downloaded to"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        yield Download(folder, blobs, unfit, files.ignores_case(folder))


@dataclass(slots=True)
class Download:
    folder: Path
    blobs: BlobStore
    unfit: Damaged
    ignores_case: bool
    images: int = 0
    bytes: int = 0
    already_there: int = 0
    undelivered: dict[str, pictures.Fault] = field(default_factory=dict)
    """Images by name that none of their records fits."""
    _delivered: set[int] = field(default_factory=set)
    """Images that are in the folder as a record has them: 60 bytes for each name."""

    def named(self, fault: pictures.Fault) -> list[str]:
        return [name for name, why in self.undelivered.items() if why == fault]

    async def run(
        self, records: Iterable[Record], on_image: Callable[[], None]
    ) -> None:
        """Downloads the images of *records*, each of which may have several."""
        images: dict[str, list[Record]] = {}
        for record in records:
            images.setdefault(record.blob or "", []).append(record)

        async def fetch(of_one: list[Record]) -> None:
            for record in of_one:
                await self._fetch(record)
                on_image()

        await concurrency.for_each(images.values(), fetch, CONCURRENCY)

    async def _fetch(self, record: Record) -> None:
        image = record.blob or ""
        name = image.rpartition("/")[2]
        path = self.folder / (files.without_case(name) if self.ignores_case else name)
        is_new = hashed(image) not in self._delivered
        if is_new and await asyncio.to_thread(_is_of, path, record):
            self.already_there += 1
        else:
            found = await RETRIES.call(lambda: pictures.find(self.blobs, [record]))
            if isinstance(found, str):
                if found == "misfit":
                    self.unfit.add(image, pictures.MISFIT)
                if is_new:
                    self.undelivered[image] = found
                return
            if found.is_kept_aside and not is_new:
                return  # a second drawing
            await asyncio.to_thread(_write, path, found.data)
            self.images += is_new
            self.bytes += len(found.data)
        self._delivered.add(hashed(image))
        self.undelivered.pop(image, None)


def _is_of(path: Path, record: Record) -> bool:
    """True if a file is the picture of a record."""
    return (
        files.size_of(path) == record.size_bytes and files.sha256(path) == record.sha256
    )


def _write(path: Path, data: bytes) -> None:
    # Not synced: a file that a power failure has emptied is not of its size. Images' names do not
    # begin with a dot, and what a kill leaves is written over by the next download.
    draft = path.with_name(f".{path.name}.partial")
    draft.write_bytes(data)
    draft.replace(path)

"""Downloads the pictures of records; what is there already is not read again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cli import console, files
from fleet.results import credentials
from fleet.results.credentials import Credentials
from imagefleet import concurrency
from imagefleet.files import pack, safetensors
from imagefleet.files.pack import Member
from imagefleet.records import pictures
from imagefleet.records.catalog import Damaged
from imagefleet.records.pictures import Fault
from imagefleet.records.record import Record, hashed
from imagefleet.storage.open import Storage
from imagefleet.submit import RETRIES

#: Reads at the same time: an image has some 400 KB.
CONCURRENCY = 32

#: Packs have 32 MiB at most.
CONCURRENT_PACKS = 6

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
def opened(
    folder: Path,
    storage: Storage,
    unfit: Damaged,
    *,
    packed: bool = False,
    signs: Credentials | None = None,
) -> Iterator[Download]:
    """A download into *folder*, which no other process writes to; counts what is *unfit*.

    *packed*: packs are stored as they are. *signs*: images get these credentials.
    """
    with files.writing(folder), console.only_one(folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield Download(
            folder, storage, unfit, files.ignores_case(folder), packed, signs
        )


#: Packs that were read whole, by name; None for one that is missing.
_Packs = dict[str, bytes | None]


@dataclass
class Download:
    folder: Path
    storage: Storage
    unfit: Damaged
    ignores_case: bool
    packed: bool
    signs: Credentials | None
    images: int = 0
    bytes: int = 0
    already_there: int = 0
    #: Images by name that none of their records fits.
    undelivered: dict[str, Fault] = field(default_factory=dict)
    #: Images that are in the folder as a record has them: 60 bytes for each name.
    _delivered: set[int] = field(default_factory=set)

    def named(self, fault: Fault) -> list[str]:
        return [name for name, why in self.undelivered.items() if why == fault]

    async def run(self, records: Iterable[Record], on_image: console.Move) -> None:
        """Downloads the images of *records*, each of which may have several."""
        images: dict[str, list[Record]] = {}
        packs: dict[str, list[Record]] = {}
        for record in records:
            to = images if record.pack is None else packs
            to.setdefault(record.pack or record.blob or "", []).append(record)

        async def fetch(of_one: list[Record]) -> None:
            read: _Packs = {}
            for record in of_one:
                await self._fetch(record, read)
                on_image()

        async def copy(of_pack: list[Record]) -> None:
            await self._copy(of_pack)
            for _ in of_pack:
                on_image()

        await concurrency.for_each(images.values(), fetch, CONCURRENCY)
        work = copy if self.packed else fetch
        await concurrency.for_each(packs.values(), work, CONCURRENT_PACKS)

    async def _copy(self, records: list[Record]) -> None:
        """Stores the pack of *records* as it is."""
        name = str(records[0].pack)
        path = self.folder / name.rpartition("/")[2]
        size, faults = await RETRIES.call(
            lambda: copy_pack(self.storage, records, path, others=True)
        )
        self.undelivered |= faults
        delivered = len({record.blob for record in records}) - len(faults)
        if size or hashed(name) in self._delivered:  # with the records before these
            self._delivered.add(hashed(name))
            self.images += delivered
        else:
            self.already_there += delivered
        self.bytes += size

    async def _fetch(self, record: Record, packs: _Packs) -> None:
        image = record.blob or ""
        name = image.rpartition("/")[2]
        path = self.folder / (files.without_case(name) if self.ignores_case else name)
        is_new = hashed(image) not in self._delivered
        if is_new and await asyncio.to_thread(self._is_of, path, record):
            self.already_there += 1
        else:
            if record.pack is not None and record.pack not in packs:
                name = record.pack
                packs[name] = await RETRIES.call(
                    lambda: self.storage.packs.read(name, pack.MAX_PACK_BYTES)
                )
            found = await RETRIES.call(
                lambda: pictures.find(self.storage, [record], packs)
            )
            if self.signs is not None and not isinstance(found, str):
                found = await asyncio.to_thread(self.signs.sign, found)
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

    def _is_of(self, path: Path, record: Record) -> bool:
        """True if a file is the picture of a record."""
        if self.signs is not None:
            return credentials.signed_from(path) == record.sha256
        is_of_size = files.size_of(path) == record.size_bytes
        return is_of_size and safetensors.sha256_of(path) == record.sha256


async def copy_pack(
    storage: Storage, records: Sequence[Record], path: Path, *, others: bool = False
) -> tuple[int, Mapping[str, Fault]]:
    """Stores the pack of *records* as a file; with *others*, also pictures that none of them is of.

    Returns the bytes that were stored, 0 if the file is there already; and, by name, the images
    that are not in the pack as their records say.
    """
    name = str(records[0].pack)
    wanted = {record.blob for record in records}
    fitting = {(record.blob, record.sha256) for record in records}

    def read(data: bytes) -> tuple[Sequence[Record], list[Record]]:
        """The records in a pack, and those that are wanted."""
        found = pack.read(name, data).records
        return found, [each for each in found if (each.blob, each.sha256) in fitting]

    if await asyncio.to_thread(path.exists):
        there, kept = await asyncio.to_thread(lambda: read(path.read_bytes()))
        if len(kept) == len(wanted) and (others or len(there) == len(kept)):
            return 0, {}
    data = await storage.packs.read(name, pack.MAX_PACK_BYTES)
    if data is None:
        return 0, {str(blob): "missing" for blob in wanted}
    there, kept = await asyncio.to_thread(read, data)
    if kept and len(kept) < len(there) and not others:
        spots = [record.spot for record in kept]
        cut_files = [
            data[spot.offset : spot.offset + spot.size_bytes] for spot in spots
        ]
        data = pack.write(name, list(map(Member, kept, cut_files))).data
    if kept:
        await asyncio.to_thread(_write, path, data)
    left_out = wanted - {record.blob for record in kept}
    return len(data) if kept else 0, {str(blob): "misfit" for blob in left_out}


def _write(path: Path, data: bytes) -> None:
    # Not synced: a file that a power failure has emptied is not of its size. Images' names do not
    # begin with a dot, and what a kill leaves is written over by the next download.
    draft = path.with_name(f".{path.name}.partial")
    draft.write_bytes(data)
    draft.replace(path)

"""Delivers the picture that a record is of: the file whose SHA-256 it has, or none."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from imagefleet.errors import JobError
from imagefleet.files import picture
from imagefleet.job.chain import SEPARATOR
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.job.names import duplicate_name
from imagefleet.records import catalog, decisions
from imagefleet.records.record import Record, Spot, of_job
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import Metadata

#: Fault of an image that is not delivered: no file, or a file that none of its records fits.
Fault = Literal["missing", "misfit"]

#: Why a record is left out.
MISFIT = "a record of another picture than the one that is stored"

#: The packs that were read whole, by their names.
Packs = Mapping[str, bytes | None]

NO_PACKS: Packs = {}

#: Drawings kept aside that are looked for: records that nobody can check name their workers.
_MOST_ASIDE = 4


#: Fields of a record that its image's file denies, if they are of another job.
_IN_FILE = ("campaign", "id", "prompt", "negative_prompt", "stage")


class Picture(NamedTuple):
    """A file, which of the records it fits, and whether it is a drawing that was kept aside."""

    data: bytes
    record: Record
    is_kept_aside: bool


async def read(storage: Storage, spot: Spot, packs: Packs = NO_PACKS) -> bytes | None:
    """The file of an image; None if there is none. *packs*: those that were read whole.

    Raises UnusableFileError if it is larger than any image, JobError if its name is of none.
    """
    if spot.pack is None:
        return await storage.blobs.read(spot.blob, MAX_IMAGE_BYTES)
    if (whole := packs.get(spot.pack)) is not None:
        return whole[spot.offset : spot.offset + spot.size_bytes]
    part = await storage.packs.read_part(spot.pack, spot.offset, spot.size_bytes)
    return None if part is None else part.data


async def read_packed(storage: Storage, name: str) -> bytes | None:
    """The verified file of the image in a pack that has this name; None if there is none."""
    shards = await catalog.shards_of(storage, name.partition("/")[0])
    key = name.rpartition(".")[0].partition(SEPARATOR)[0]
    of_job = await decisions.packed_images(storage, shards, {key})
    records = [record for record in of_job if record.blob == name]
    found = await find(storage, records) if records else "missing"
    return None if isinstance(found, str) else found.data


async def find(
    storage: Storage,
    records: Sequence[Record],
    packs: Packs = NO_PACKS,
) -> Picture | Fault:
    """The picture that one of an image's *records* fits: the stored one, if there is any.

    Else somebody has taken its name: then it is what its worker has kept aside. *packs*: as `read`.
    """
    image = records[0].blob or ""
    if len({record.spot for record in records}) > 1:
        first = await decisions.metadata_of(storage, records)
        records = [each for each in records if each.fits(first[image])] or records
    stored = dict.fromkeys(record.spot for record in records)
    asides = [
        Spot(duplicate_name(image, record.worker)) for record in records[:_MOST_ASIDE]
    ]
    fault: Fault = "missing"
    for spot in (*stored, *asides):
        told: Metadata = {}
        try:
            data = await read(storage, spot, packs)
            # A worker that found the image of one that died does not know its bytes.
            if not all(record.sha256 for record in records):
                told = await storage.blobs.metadata(spot.blob) or {}
        except JobError:  # larger than any image, or a name of none
            fault = "misfit"
            continue
        if data is None:
            continue
        if (
            record := await asyncio.to_thread(_fitting, records, data, told)
        ) is not None:
            return Picture(data, record, spot not in stored)
        fault = "misfit"
    return fault


def _fitting(records: Sequence[Record], data: bytes, told: Metadata) -> Record | None:
    """The record that has the file's SHA-256, and tells of the job that is in the file.

    One without, by *told*, the file's metadata: if they are of the file and of the record's job.
    """
    digest = hashlib.sha256(data).hexdigest()
    is_of_file = told.get("sha256") == digest
    same = [record for record in records if record.sha256 == digest]
    same += [
        each
        for each in records
        if not each.sha256 and is_of_file and each.digest == told.get("digest")
    ]
    if not same:
        return None
    found = picture.job_in(
        data
    )  # where there is none, as in a large JPEG, nothing denies it
    in_file = {} if found is None else of_job(found[1])
    known = {name: in_file[name] for name in _IN_FILE if name in in_file}
    for record in same:
        if all(getattr(record, name) in {None, value} for name, value in known.items()):
            return record
    return None

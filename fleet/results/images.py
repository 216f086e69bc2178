"""Reads images by their records, and says what is wrong with those that are not as recorded."""

from __future__ import annotations

from typing import Literal

from imagefleet import errors
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

"""Reads images by their records, and says what is wrong with those that are not as recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imagefleet import errors
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore
from imagefleet.submit import RETRIES

#: Reads at the same time: an image has some 400 KB.
CONCURRENCY = 32

Fault = Literal["missing", "changed"]


@dataclass(frozen=True, slots=True)
class Image:
    """An image's bytes; with a fault, None or not what a worker has stored."""

    data: bytes | None
    fault: Fault | None = None


async def read(blobs: BlobStore, record: Record) -> Image:
    """Reads the image of a record, which has to have the recorded size."""
    assert record.blob is not None  # noqa: S101 - every record of an image names it
    name = record.blob
    try:
        data = await RETRIES.call(lambda: blobs.read(name, MAX_IMAGE_BYTES))
    except errors.UnusableFileError:  # larger than any image
        return Image(None, "changed")
    if data is None:
        return Image(None, "missing")
    return Image(data, None if record.size_bytes in {None, len(data)} else "changed")

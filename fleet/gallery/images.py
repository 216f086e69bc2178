"""Thumbnails and pictures, read from the storage when a page asks for them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from cachetools import LRUCache
from PIL import Image

from imagefleet import errors
from imagefleet.files import picture
from imagefleet.files.picture import DamagedImageError
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore

#: Read and decoded at the same time: a file has 32 MiB at most, its pixels 16 MiB.
_READS = 8

#: The longer side: half that of an image, which is made several times as fast as other sizes, and
#: more than that of a tile, for screens of high resolution.
_PIXELS = 256

#: A WebP is half as large, and takes ten times as long: more than to decode the image.
_JPEG_QUALITY = 82

#: Thumbnails that are kept, some 10,000; the browser keeps its own.
_KEPT_BYTES = 10**8


class Images:
    """The images of one container."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._reads = asyncio.Semaphore(_READS)
        self._kept: LRUCache[str, bytes] = LRUCache(_KEPT_BYTES, getsizeof=len)

    async def thumbnail(self, record: Record, is_wanted: Callable[[], bool]) -> bytes:
        """A JPEG, made once; raises DamagedImageError.

        Nothing is read for an image that is not wanted any more when it is its turn.
        """
        key = f"{record.blob}?{record.size_bytes}"  # one that is replaced has another size
        if key in self._kept:
            return self._kept[key]
        async with self._reads:
            if not is_wanted():
                raise DamagedImageError("nobody waits for it any more")
            made = await asyncio.to_thread(shrink, await self._read(record))
        self._kept[key] = made
        return made

    async def picture(self, record: Record) -> tuple[bytes, str]:
        """The image's file as it is stored, and its type; raises DamagedImageError."""
        async with self._reads:
            data = await self._read(record)
        return data, await asyncio.to_thread(content_type, data)

    async def _read(self, record: Record) -> bytes:
        try:
            data = await self._blobs.read(record.blob or "", MAX_IMAGE_BYTES)
        except (errors.JobError, errors.UnusableFileError) as error:
            raise DamagedImageError(error.message) from None
        if data is None:
            raise DamagedImageError("the image has been deleted")
        return data


def shrink(data: bytes) -> bytes:
    """An image's thumbnail as a JPEG; raises DamagedImageError."""
    with picture.opened(data) as image:
        image.draft("RGB", (_PIXELS, _PIXELS))  # a JPEG is decoded at a smaller size
        small = image.convert("RGB")
        small.thumbnail((_PIXELS, _PIXELS), Image.Resampling.BICUBIC, reducing_gap=1)
        stored = io.BytesIO()
        small.save(stored, "JPEG", quality=_JPEG_QUALITY)
    return stored.getvalue()


def content_type(data: bytes) -> str:
    """The type of an image that a browser may decode; raises DamagedImageError."""
    with picture.opened(data) as image:
        return f"image/{str(image.format).lower()}"

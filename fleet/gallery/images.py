"""Thumbnails and pictures, read from the storage when a page asks for them."""

import asyncio
import io
from collections.abc import Callable, Sequence

from cachetools import LRUCache
from PIL import Image

from imagefleet.files import picture
from imagefleet.files.picture import DamagedImageError
from imagefleet.records import pictures
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage

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
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._reads = asyncio.Semaphore(_READS)
        self._kept: LRUCache[str, bytes] = LRUCache(_KEPT_BYTES, getsizeof=len)
        self._misfits = set[str]()

    async def thumbnail(
        self, records: Sequence[Record], is_wanted: Callable[[], bool]
    ) -> bytes:
        """A JPEG, made once; raises DamagedImageError, also if it is no longer wanted."""
        key = " ".join(
            (records[0].blob or "", *(str(record.sha256) for record in records))
        )
        if key in self._kept:
            return self._kept[key]
        async with self._reads:
            if not is_wanted():
                raise DamagedImageError("nobody waits for it any more")
            made = await asyncio.to_thread(shrink, (await self._find(records)).data)
        self._kept[key] = made
        return made

    async def picture(self, records: Sequence[Record]) -> tuple[Record, bytes, str]:
        """The record that fits, the image's file and its type; raises DamagedImageError."""
        async with self._reads:
            found = await self._find(records)
        return (
            found.record,
            found.data,
            await asyncio.to_thread(content_type, found.data),
        )

    def misfits(self, campaign: str) -> int:
        """Number of images of a campaign, of those shown so far, without a fitting record."""
        return sum(name.startswith(f"{campaign}/") for name in self._misfits)

    async def _find(self, records: Sequence[Record]) -> pictures.Picture:
        image = records[0].blob or ""
        found = await pictures.find(self._storage, records)
        if found == "misfit":
            self._misfits.add(image)
            raise DamagedImageError(
                "its record does not fit what is stored under its name"
            )
        self._misfits.discard(image)
        if found == "missing":
            raise DamagedImageError("the image has been deleted")
        return found


def shrink(data: bytes) -> bytes:
    """An image's thumbnail as a JPEG; raises DamagedImageError."""
    with picture.opened(data) as image:
        image.draft("RGB", (_PIXELS, _PIXELS))  # a JPEG is decoded at a smaller size
        small = picture.eight_bits(image).convert("RGB")
        small.thumbnail((_PIXELS, _PIXELS), Image.Resampling.BICUBIC, reducing_gap=1)
        stored = io.BytesIO()
        small.save(stored, "JPEG", quality=_JPEG_QUALITY)
    return stored.getvalue()


def content_type(data: bytes) -> str:
    """The type of an image that a browser may decode; raises DamagedImageError."""
    with picture.opened(data) as image:
        return f"image/{str(image.format).lower()}"

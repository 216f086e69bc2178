"""Thumbnails and pictures, read from the storage when a page asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable

from fleet.gallery import thumbnails
from fleet.gallery.thumbnails import Thumbnails, UnusableImageError
from imagefleet import errors
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.records.record import Record
from imagefleet.storage.protocol import BlobStore

#: Read, and decoded, at the same time: a file has 32 MiB at most, its pixels 16 MiB.
_READS = 8
_DECODERS = min(4, os.cpu_count() or 1)


def _always() -> bool:
    return True


class Images:
    """The images of one container; *address* tells containers apart in the cache."""

    def __init__(self, blobs: BlobStore, address: str, kept: Thumbnails) -> None:
        self._blobs = blobs
        self._address = address
        self._kept = kept
        self._reads = asyncio.Semaphore(_READS)
        self._decoders = asyncio.Semaphore(_DECODERS)

    async def thumbnail(self, record: Record, is_wanted: Callable[[], bool] = _always) -> bytes:
        """A JPEG, from the cache or made now; raises UnusableImageError.

        Nothing is read for an image that is not wanted any more when it is its turn.
        """
        # An image that is replaced has another size, most likely.
        key = thumbnails.key_of(f"{self._address}/{record.blob}?{record.size_bytes}")
        if kept := await asyncio.to_thread(self._stored, key):
            return kept
        async with self._reads:
            if not is_wanted():
                raise UnusableImageError("nobody waits for it any more")
            data = await self._read(record)
            async with self._decoders:
                return await asyncio.to_thread(self._made, key, data)

    def _stored(self, key: bytes) -> bytes | None:
        with contextlib.suppress(sqlite3.Error):  # what cannot be read is made
            return self._kept.read(key)
        return None

    def _made(self, key: bytes, data: bytes) -> bytes:
        made = thumbnails.shrink(data)
        with contextlib.suppress(sqlite3.Error):  # on a full disk it is made again
            self._kept.keep(key, made)
        return made

    async def picture(self, record: Record) -> tuple[bytes, str]:
        """The image's file as it is stored, and its type; raises UnusableImageError."""
        async with self._reads:
            data = await self._read(record)
        return data, await asyncio.to_thread(thumbnails.content_type, data)

    async def _read(self, record: Record) -> bytes:
        try:
            data = await self._blobs.read(record.blob or "", MAX_IMAGE_BYTES)
        except (errors.JobError, errors.UnusableFileError) as error:
            raise UnusableImageError(error.message) from None
        if data is None:
            raise UnusableImageError("the image has been deleted")
        return data

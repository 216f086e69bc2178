"""Thumbnails of images: each is made once, and kept in a SQLite file of limited size.

An image's file may be anything: whoever may store images writes what he likes.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from pathlib import Path

from PIL import Image

from fleet.gallery import cache
from imagefleet.job.message import MAX_IMAGE_PIXELS

#: The longer side: half that of an image, which is made several times as fast as other sizes, and
#: more than that of a tile, for screens of high resolution.
PIXELS = 256

#: A WebP is half as large, and takes ten times as long: more than to decode the image.
_JPEG_QUALITY = 82

#: The share to which a full file is emptied, the least recently used first.
_KEPT_SHARE = 0.9

#: A thumbnail's last use is noted once in this time.
_USE_SECONDS = 3600

#: Raised with the tables: a file of another version is made again.
_VERSION = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS thumbnails(
    key BLOB PRIMARY KEY, bytes INTEGER NOT NULL, used_at INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON thumbnails(used_at, bytes);
"""

_CONTENT_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


class UnusableImageError(Exception):
    """A file is no image that a worker can have stored; says why."""


class Thumbnails:
    """The kept thumbnails. Its calls block: they are for threads."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises SetupError if the file cannot be written."""
        Image.preinit()  # takes a while, and a page would wait for it
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._db = cache.opened(path, _TABLES, _VERSION)
        self._bytes = self._stored_bytes()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def read(self, key: bytes) -> bytes | None:
        """A JPEG; None if it is not kept."""
        with self._lock:
            found = self._db.execute(
                "SELECT data, used_at FROM thumbnails WHERE key = ?", [key]
            ).fetchone()
            now = int(time.time())
            if found and now - found[1] > _USE_SECONDS:
                self._db.execute("UPDATE thumbnails SET used_at = ? WHERE key = ?", [now, key])
        return found[0] if found else None

    def keep(self, key: bytes, data: bytes) -> None:
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO thumbnails VALUES(?, ?, ?, ?)",
                [key, len(data), int(time.time()), data],
            )
            self._bytes += len(data)
            if self._bytes > self._max_bytes:
                self._remove_oldest()

    def _remove_oldest(self) -> None:
        self._bytes = self._stored_bytes()  # another process may have added some
        excess = self._bytes - int(_KEPT_SHARE * self._max_bytes)
        removed = []
        oldest = self._db.execute("SELECT rowid, bytes FROM thumbnails ORDER BY used_at, rowid")
        for row, size in oldest:
            if excess <= 0:
                break
            removed.append([row])
            excess -= size
            self._bytes -= size
        oldest.close()
        self._db.executemany("DELETE FROM thumbnails WHERE rowid = ?", removed)

    def _stored_bytes(self) -> int:
        return int(self._db.execute("SELECT coalesce(sum(bytes), 0) FROM thumbnails").fetchone()[0])


def key_of(address: str) -> bytes:
    """The key of the image at an address."""
    return hashlib.blake2b(address.encode(), digest_size=16).digest()


def shrink(data: bytes) -> bytes:
    """An image's thumbnail as a JPEG; raises UnusableImageError."""
    with _opened(data) as image:
        try:
            image.draft("RGB", (PIXELS, PIXELS))  # a JPEG is decoded at a smaller size
            small = image.convert("RGB")
            small.thumbnail((PIXELS, PIXELS), Image.Resampling.BICUBIC, reducing_gap=1)
            stored = io.BytesIO()
            small.save(stored, "JPEG", quality=_JPEG_QUALITY)
        except Exception as error:  # noqa: BLE001 - Pillow's parsers raise a dozen kinds
            raise UnusableImageError(f"a damaged image ({type(error).__name__})") from None
    return stored.getvalue()


def content_type(data: bytes) -> str:
    """The type of an image that a browser may decode; raises UnusableImageError."""
    with _opened(data) as image:
        return _CONTENT_TYPES[str(image.format)]


def _opened(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(_CONTENT_TYPES))
    except Exception:  # noqa: BLE001 - as above
        raise UnusableImageError("not a PNG, JPEG or WebP image") from None
    if image.width * image.height > MAX_IMAGE_PIXELS:  # before the pixels take memory
        image.close()
        raise UnusableImageError(
            f"{image.width:,} x {image.height:,} pixels; {MAX_IMAGE_PIXELS:,} are shown at most"
        )
    return image

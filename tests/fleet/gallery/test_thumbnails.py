"""Thumbnails are made once, of anything that a blob may hold, and take no more than their share."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fleet.gallery import thumbnails
from fleet.gallery.images import Images
from fleet.gallery.thumbnails import Thumbnails, UnusableImageError
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings


def file_of(kind: str = "PNG", size: tuple[int, int] = (640, 320), mode: str = "RGB") -> bytes:
    stored = io.BytesIO()
    Image.new(mode, size, 1).save(stored, kind)
    return stored.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that says it has *side* squared pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_of_any_format_becomes_a_small_jpeg(kind: str) -> None:
    with Image.open(io.BytesIO(thumbnails.shrink(file_of(kind)))) as made:
        assert (made.format, made.size) == ("JPEG", (256, 128))
    assert thumbnails.content_type(file_of(kind)) == f"image/{kind.lower()}"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "I;16", "1"])
def test_an_image_of_any_mode_becomes_a_thumbnail(mode: str) -> None:
    assert thumbnails.shrink(file_of(mode=mode))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "not a PNG"),
        (file_of("GIF"), "not a PNG"),
        (file_of("BMP"), "not a PNG"),
        (bomb(2049), "pixels"),
        (bomb(50_000), "not a PNG|pixels"),
        (file_of()[:-30], "damaged"),
    ],
)
def test_what_no_worker_can_have_stored_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnusableImageError, match=reason):
        thumbnails.shrink(data)


def test_the_least_recently_used_thumbnails_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(thumbnails.time, "time", lambda: now)
    kept = Thumbnails(tmp_path / "thumbnails.sqlite", max_bytes=10_000)
    for number in range(9):
        now += 10_000
        kept.keep(bytes([number]), bytes(1000))
        assert kept.read(bytes([0])) is not None
    for number in range(9, 20):
        now += 10_000
        kept.keep(bytes([number]), bytes(1000))

    there = [number for number in range(20) if kept.read(bytes([number]))]
    assert there == [*range(20 - len(there), 20)], "the first was used last of the first nine"
    assert 8 <= len(there) <= 10
    kept.close()

    again = Thumbnails(tmp_path / "thumbnails.sqlite", max_bytes=5_000)
    again.keep(b"new", bytes(1000))
    assert sum(again.read(bytes([number])) is not None for number in range(20)) <= 4
    assert again.read(b"new")
    again.close()


async def test_a_thumbnail_is_made_once_and_an_image_of_gigabytes_is_not_read(
    tmp_path: Path,
) -> None:
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    kept = Thumbnails(tmp_path / "thumbnails.sqlite", 10**6)
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.blobs.create("spring/1.png", file_of(), "image/png", {})
        huge = tmp_path / "data" / "images" / "spring" / "2.png"
        with huge.open("wb") as file:
            file.truncate(2**34)
        images = Images(storage.blobs, "here", kept)
        before = storage.operations.blob_reads
        for _ in range(3):
            assert await images.thumbnail(record("spring/1.png"))
        assert storage.operations.blob_reads - before == 1
        for name in ("spring/2.png", "spring/3.png", "../../x", "-records/x", ""):
            with pytest.raises(UnusableImageError):
                await images.thumbnail(record(name))
    kept.close()


async def test_an_image_that_was_scrolled_away_is_not_read(tmp_path: Path) -> None:
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    kept = Thumbnails(tmp_path / "thumbnails.sqlite", 10**6)
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.blobs.create("spring/1.png", file_of(), "image/png", {})
        images = Images(storage.blobs, "here", kept)
        with pytest.raises(UnusableImageError):
            await images.thumbnail(record("spring/1.png"), lambda: False)
        assert storage.operations.blob_reads == 0
        made = await images.thumbnail(record("spring/1.png"))
        assert await images.thumbnail(record("spring/1.png"), lambda: False) == made
    kept.close()


async def test_a_thumbnail_that_cannot_be_kept_is_shown_all_the_same(tmp_path: Path) -> None:
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    kept = Thumbnails(tmp_path / "thumbnails.sqlite", 10**6)
    kept._db.execute("PRAGMA query_only = on")  # as a full disk
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.blobs.create("spring/1.png", file_of(), "image/png", {})
        images = Images(storage.blobs, "here", kept)
        for _ in range(2):
            assert await images.thumbnail(record("spring/1.png"))
        assert storage.operations.blob_reads == 2
    kept.close()


def record(blob: str) -> Record:
    return Record(outcome="completed", id="1", at="2026-11-22T12:00:00Z", blob=blob)

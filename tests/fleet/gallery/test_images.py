"""Thumbnails are made once, of anything that a blob may hold, and take no more than their share."""

import hashlib
import io

import pytest
from PIL import Image

from fleet.gallery import images as gallery_images
from fleet.gallery.images import Images
from imagefleet.files.picture import DamagedImageError
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings


def file_of(
    kind: str = "PNG", size: tuple[int, int] = (640, 320), mode: str = "RGB"
) -> bytes:
    stored = io.BytesIO()
    Image.new(mode, size, 1).save(stored, kind)
    return stored.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_of_any_format_becomes_a_small_jpeg(kind: str):
    with Image.open(io.BytesIO(gallery_images.shrink(file_of(kind)))) as made:
        assert (made.format, made.size) == ("JPEG", (256, 128))
    assert gallery_images.content_type(file_of(kind)) == f"image/{kind.lower()}"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "I;16", "1"])
def test_an_image_of_any_mode_becomes_a_thumbnail(mode: str):
    assert gallery_images.shrink(file_of(mode=mode))


async def test_the_least_recently_used_thumbnails_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gallery_images, "_KEPT_BYTES", 3 * len(gallery_images.shrink(file_of()))
    )
    async with open_storage(
        StorageSettings(storage=f"local:{tmp_path / 'data'}")
    ) as storage:
        await storage.create()
        images = Images(storage)

        async def reads_of(number: int) -> int:
            before = storage.operations.blob_reads
            await images.thumbnail(record(f"spring/{number}.png"), lambda: True)
            return storage.operations.blob_reads - before

        for number in range(4):
            await storage.blobs.create(
                f"spring/{number}.png", file_of(), "image/png", {}
            )
        assert [await reads_of(number) for number in (0, 1, 2, 0, 3)] == [1, 1, 1, 0, 1]
        assert [await reads_of(number) for number in (0, 2, 3, 1)] == [0, 0, 0, 1]


async def test_a_thumbnail_is_made_once_and_an_image_of_gigabytes_is_not_read(
    tmp_path,
):
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.blobs.create("spring/1.png", file_of(), "image/png", {})
        huge = tmp_path / "data" / "images" / "spring" / "2.png"
        with huge.open("wb") as file:
            file.truncate(2**34)
        images = Images(storage)
        before = storage.operations.blob_reads
        for _ in range(3):
            assert await images.thumbnail(record("spring/1.png"), lambda: True)
        assert storage.operations.blob_reads - before == 1
        for name in ("spring/2.png", "spring/3.png", "../../x", "-records/x", ""):
            with pytest.raises(DamagedImageError):
                await images.thumbnail(record(name), lambda: True)


async def test_an_image_that_was_scrolled_away_is_not_read(tmp_path):
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    async with open_storage(settings) as storage:
        await storage.create()
        await storage.blobs.create("spring/1.png", file_of(), "image/png", {})
        images = Images(storage)
        with pytest.raises(DamagedImageError):
            await images.thumbnail(record("spring/1.png"), lambda: False)
        assert storage.operations.blob_reads == 0
        made = await images.thumbnail(record("spring/1.png"), lambda: True)
        assert await images.thumbnail(record("spring/1.png"), lambda: False) == made


def record(blob: str, data: bytes | None = None) -> list[Record]:
    digest = hashlib.sha256(file_of() if data is None else data).hexdigest()
    at = "2026-11-22T12:00:00Z"
    return [Record(outcome="completed", id="1", at=at, blob=blob, sha256=digest)]

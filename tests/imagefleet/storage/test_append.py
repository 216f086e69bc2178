"""The contract of appending and of listing folders, on both storages."""

import pytest

from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

NAME = "-records/spring/a.images.jsonl.gz"


async def test_what_is_appended_follows_what_was_there(storage: Storage):
    assert await storage.blobs.append(NAME, b"one,", 0)
    assert await storage.blobs.append(NAME, b"two", 4)
    assert await storage.blobs.read(NAME) == b"one,two"
    (record,) = [each async for each in storage.blobs.records("-records/")]
    assert (record.name, record.size_bytes) == (NAME, 7)


async def test_nothing_is_appended_at_another_position_than_the_end(
    storage: Storage,
):
    await storage.blobs.append(NAME, b"four", 0)
    for position in (0, 3, 5):
        assert not await storage.blobs.append(NAME, b"late", position)
        assert await storage.blobs.read(NAME) == b"four"


async def test_nothing_is_appended_to_a_blob_that_is_gone(storage: Storage):
    await storage.blobs.append(NAME, b"four", 0)
    await storage.blobs.delete(NAME)
    assert not await storage.blobs.append(NAME, b"late", 4)


async def test_an_image_is_never_appended_to(storage: Storage):
    await storage.blobs.create("spring/a.png", b"image", "image/png", {})
    assert not await storage.blobs.append("spring/a.png", b"more", 0)
    assert await storage.blobs.read("spring/a.png") == b"image"


async def test_what_exists_is_told_and_not_changed(storage: Storage):
    await storage.blobs.create("spring/a.png", b"image", "image/png", {})
    await storage.blobs.append(NAME, b"one", 0)
    names = ("spring/a.png", NAME, "spring/b.png", "spring")
    assert [await storage.blobs.exists(name) for name in names] == [
        True,
        True,
        False,
        False,
    ]
    assert await storage.blobs.read("spring/a.png") == b"image"
    assert await storage.blobs.read(NAME) == b"one"
    assert not [name async for name in storage.blobs.names("spring/b")]


async def test_appending_to_a_container_that_does_not_exist_says_so(
    storage_settings: StorageSettings,
):
    missing = storage_settings.model_copy(update={"container": "no-such-container"})
    async with open_storage(missing) as storage:
        with pytest.raises(errors.SetupError, match=r"imagefleet load. creates it"):
            await storage.blobs.append(NAME, b"one", 0)


async def test_folders_are_those_right_below(storage: Storage):
    for name in (
        "-records/b/1",
        "-records/a/1",
        "-records/a/c/2",
        "-records/file",
        "a/1.png",
    ):
        await storage.blobs.create(name, b"", "text/plain", {})
    assert [each async for each in storage.blobs.folders("-records/")] == ["a", "b"]
    assert [each async for each in storage.blobs.folders("nothing/")] == []

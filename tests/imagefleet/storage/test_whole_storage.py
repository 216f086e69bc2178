"""What both storages promise as a whole: what is created, counted and addressed."""

from __future__ import annotations

import dataclasses
import re

import pytest

from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30


async def test_operations_are_counted_as_azure_bills_them(storage: Storage) -> None:
    before = dataclasses.replace(storage.operations)
    await storage.queue.send(["a job", "another"])
    first, second = await storage.queue.receive(2, LEASE_SECONDS)
    await storage.queue.delete(await storage.queue.renew(first, LEASE_SECONDS))
    await storage.queue.release(second)
    await storage.queue.depth()
    await storage.poison.send(["failed"])
    assert [message.body async for message in storage.poison.browse()] == ["failed"]
    assert storage.operations.queue - before.queue == 2 + 2 + 2 + 1 + 4 + 1 + 1

    assert await storage.blobs.create("a.png", b"x", "image/png", {})
    assert not await storage.blobs.create("a.png", b"x", "image/png", {})
    assert [name async for name in storage.blobs.names()] == ["a.png"]
    assert [record.name async for record in storage.blobs.records()] == ["a.png"]
    of_depth = 1  # a listing: which models have queues
    assert storage.operations.blob_writes - before.blob_writes == of_depth + 2 + 2

    assert await storage.blobs.read("a.png") == b"x"
    assert await storage.blobs.read_part("a.png", 0, 1) is not None
    assert await storage.blobs.delete("a.png")
    assert storage.operations.blob_reads - before.blob_reads == 2
    assert storage.operations.blob_writes - before.blob_writes == 5, "deletes are free"


def test_a_blobs_address_names_it_and_holds_no_secret(storage: Storage) -> None:
    address = storage.blobs.address("spring/a b.png")

    assert re.fullmatch(r"(file|http)://[^?]+/spring/a%20b\.png", address)


# The storage as a whole


async def test_a_storage_that_was_not_created_is_a_setup_error(
    storage_settings: StorageSettings,
) -> None:
    async with open_storage(storage_settings) as storage:
        with pytest.raises(errors.SetupError, match="imagefleet load"):
            await storage.check()
        with pytest.raises(errors.SetupError):
            await storage.queue.send(["a job"])
        with pytest.raises(errors.SetupError):
            await storage.queue.receive(1, LEASE_SECONDS)
        for blobs in (storage.blobs, storage.files):
            with pytest.raises(errors.SetupError, match="imagefleet load"):
                await blobs.check()
            with pytest.raises(errors.SetupError):
                await blobs.create("a.png", b"x", "image/png", {})


async def test_images_and_files_are_apart(storage: Storage) -> None:
    assert storage.blobs.name != storage.files.name
    for number, blobs in enumerate((storage.blobs, storage.files)):
        await blobs.check()
        assert await blobs.create("loras/fox.safetensors", str(number).encode(), "text/plain", {})
    assert await storage.files.read("loras/fox.safetensors") == b"1"
    assert [name async for name in storage.blobs.names("loras/")] == ["loras/fox.safetensors"]
    assert await storage.blobs.delete("loras/fox.safetensors")
    assert [name async for name in storage.files.names()] == ["loras/fox.safetensors"]


async def test_create_keeps_the_contents_of_an_existing_storage(storage: Storage) -> None:
    await storage.queue.send(["a job"])
    await storage.create()
    await storage.check()
    (received,) = await storage.queue.receive(1, LEASE_SECONDS)
    assert received.body == "a job"

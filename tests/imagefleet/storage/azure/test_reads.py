"""Reads and listings: whatever is in a name, and what a proxy makes up."""

import pytest
from aiohttp import web

from imagefleet import concurrency, errors
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.settings import StorageSettings

ODD = ["a b", "100%", "1+1=2&c", "%41", "größe", "~a'b(c)", "#1;x,y", "house-🏠"]


async def test_a_blob_is_read_and_listed_by_its_name_whatever_is_in_it(
    azurite_settings: StorageSettings,
):
    async with AzureStorage(azurite_settings, concurrency.NEVER) as storage:
        await storage.create()
        for odd in ODD:
            name = f"{odd}/{odd}.png"
            assert await storage.blobs.create(
                name, b"0123456789", "image/png", {"by": "me"}
            )
            part = await storage.blobs.read_part(name, 3, 4)
            assert part is not None
            assert (part.data, part.total_bytes) == (b"3456", 10)
            (listed,) = [each async for each in storage.blobs.records(f"{odd}/")]
            assert (listed.name, listed.size_bytes, listed.metadata) == (
                name,
                10,
                {"by": "me"},
            )
            assert listed == await storage.blobs.record(name)
        folders = [each async for each in storage.blobs.folders("")]
        assert sorted(folders) == sorted(ODD)


async def test_reads_and_pages_of_listings_are_counted_as_they_are_billed(
    azurite_settings: StorageSettings, monkeypatch
):
    monkeypatch.setattr("imagefleet.storage.azure.blobs._NAMES_PAGE", 2)
    async with AzureStorage(azurite_settings, concurrency.NEVER) as storage:
        await storage.create()
        for number in range(5):
            await storage.blobs.create(f"{number}", b"1", "image/png", {})
        before = storage.operations.blob_writes, storage.operations.blob_reads
        assert [name async for name in storage.blobs.names()] == [
            "0",
            "1",
            "2",
            "3",
            "4",
        ]
        await storage.blobs.read_part("0", 0, 1)
        after = storage.operations.blob_writes, storage.operations.blob_reads
    assert (after[0] - before[0], after[1] - before[1]) == (3, 1)


@pytest.mark.parametrize("answer", ["", "<html/>", "<EnumerationResults>"])
async def test_a_listing_that_a_proxy_made_up_is_not_an_empty_one(answer: str):
    async def made_up(_: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/xml")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made_up)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/devstoreaccount1"
    address = f"AccountName=devstoreaccount1;AccountKey=a2V5;BlobEndpoint={url};QueueEndpoint={url}"
    try:
        async with AzureStorage(
            StorageSettings(storage=address), concurrency.NEVER
        ) as storage:
            with pytest.raises(errors.TransientError, match="not one of Azure"):
                _ = [name async for name in storage.blobs.names()]
    finally:
        await runner.cleanup()

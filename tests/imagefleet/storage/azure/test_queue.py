"""Properties of Azure Storage alone: messages and blobs as other programs see them."""

from azure.storage.blob.aio import BlobClient
from azure.storage.queue.aio import QueueClient

from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30


async def test_messages_never_expire(azurite_settings: StorageSettings):
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        await storage.queue.send(["a job"])
    async with QueueClient.from_connection_string(
        azurite_settings.storage, azurite_settings.queue, api_version=API_VERSION
    ) as others:
        (message,) = await others.peek_messages()
        assert message.expires_on.year == 9999


async def test_a_blob_carries_its_content_type_and_metadata(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        await storage.blobs.create(
            "a/fox.png", b"pixels", "image/png", {"seed": "7", "note": "<&>"}
        )
    async with BlobClient.from_connection_string(
        azurite_settings.storage,
        azurite_settings.container,
        "a/fox.png",
        api_version=API_VERSION,
    ) as others:
        properties = await others.get_blob_properties()
    assert properties.content_settings.content_type == "image/png"
    assert properties.metadata == {"seed": "7", "note": "<&>"}


async def test_a_message_of_another_program_is_received_unchanged(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        async with QueueClient.from_connection_string(
            azurite_settings.storage, azurite_settings.queue, api_version=API_VERSION
        ) as others:
            await others.send_message("eyJwcm9tcHQiOiAiYSBmb3gifQ==")
        (message,) = await storage.queue.receive(1, LEASE_SECONDS)
        assert message.body == "eyJwcm9tcHQiOiAiYSBmb3gifQ=="

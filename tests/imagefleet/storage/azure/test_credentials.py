"""Account keys and SAS tokens with restricted permissions."""

import json
import re
import traceback
from datetime import UTC, datetime, timedelta

import pytest
from azure.storage.blob import (
    AccountSasPermissions,
    ContainerSasPermissions,
    ResourceTypes,
    Services,
    generate_account_sas,
    generate_container_sas,
)
from azure.storage.queue import QueueSasPermissions, generate_queue_sas
from pydantic import SecretStr

from imagefleet import errors
from imagefleet.concurrency import NEVER
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings

ONE_HOUR = timedelta(hours=1)


def endpoints(settings: StorageSettings) -> str:
    """The connection string without its key."""
    return ";".join(re.findall(r"\w+Endpoint=[^;]+", settings.storage))


def account_of(settings: StorageSettings) -> dict[str, str]:
    name, key = re.findall(r"Account(?:Name|Key)=([^;]+)", settings.storage)
    return {"account_name": name, "account_key": key}


def queue_sas(settings: StorageSettings, queue: str, permissions: str) -> str:
    return generate_queue_sas(
        **account_of(settings),
        queue_name=queue,
        permission=QueueSasPermissions.from_string(permissions),
        expiry=datetime.now(UTC) + ONE_HOUR,
    )


def container_sas(
    settings: StorageSettings, permissions: str, container: str | None = None
) -> str:
    return generate_container_sas(
        **account_of(settings),
        container_name=container or settings.container,
        permission=ContainerSasPermissions.from_string(permissions),
        expiry=datetime.now(UTC) + ONE_HOUR,
    )


def with_tokens(settings: StorageSettings, **tokens: str) -> StorageSettings:
    sas = SecretStr(json.dumps(tokens))
    return settings.model_copy(update={"storage": endpoints(settings), "sas": sas})


async def test_a_missing_container_is_detected_with_a_sas_token(
    azurite_settings: StorageSettings, owner: Storage
):
    """A container's SAS token cannot read the properties of the container."""
    settings = with_tokens(
        azurite_settings.model_copy(update={"container": "no-such-container"}),
        queue=queue_sas(azurite_settings, azurite_settings.queue, "raup"),
        poison=queue_sas(azurite_settings, azurite_settings.poison_queue, "a"),
        blob=container_sas(azurite_settings, "c", "no-such-container"),
    )
    async with AzureStorage(settings, NEVER) as storage:
        with pytest.raises(
            errors.SetupError, match="'no-such-container' does not exist"
        ):
            await storage.check()


async def test_a_token_that_may_only_create_does_no_more(
    azurite_settings: StorageSettings, owner: Storage
):
    settings = with_tokens(azurite_settings, blob=container_sas(azurite_settings, "c"))
    async with AzureStorage(settings, NEVER) as storage:
        await storage.blobs.check()
        assert [name async for name in owner.blobs.names()] == [], (
            "the check creates nothing"
        )
        assert await storage.blobs.create("fox.png", b"pixels", "image/png", {})
        assert not await storage.blobs.create("fox.png", b"others", "image/png", {})
        assert await owner.blobs.read("fox.png") == b"pixels"
        with pytest.raises(errors.SetupError, match="AuthorizationPermissionMismatch"):
            await storage.blobs.read("fox.png")
        assert not await storage.blobs.delete("fox.png")


async def test_a_token_that_may_not_even_create_is_not_told_that_the_name_is_taken(
    azurite_settings: StorageSettings, owner: Storage
):
    await owner.blobs.create("fox.png", b"pixels", "image/png", {})
    settings = with_tokens(azurite_settings, blob=container_sas(azurite_settings, "l"))
    async with AzureStorage(settings, NEVER) as storage:
        for name in ("fox.png", "owl.png"):
            with pytest.raises(errors.SetupError, match="may not create blobs"):
                await storage.blobs.create(name, b"pixels", "image/png", {})


@pytest.mark.parametrize("key", ["a2V5", "not base64!"])
async def test_a_wrong_key_is_refused_by_the_check(
    azurite_settings: StorageSettings, key: str
):
    address = re.sub(r"AccountKey=[^;]+", f"AccountKey={key}", azurite_settings.storage)
    settings = azurite_settings.model_copy(update={"storage": address})
    with pytest.raises(errors.SetupError, match="key") as caught:
        async with AzureStorage(settings, NEVER) as storage:
            await storage.check()
    assert key not in caught.value.message


async def test_a_resource_without_a_token_is_not_asked(
    azurite_settings: StorageSettings, owner: Storage
):
    token = queue_sas(azurite_settings, azurite_settings.queue, "raup")
    async with AzureStorage(
        with_tokens(azurite_settings, queue=token), NEVER
    ) as storage:
        await storage.queue.check()
        before = storage.operations.queue
        with pytest.raises(errors.SetupError, match="there is no SAS token"):
            await storage.poison.check()
        assert storage.operations.queue == before
        await storage.create()  # as far as the tokens allow, that is nothing


async def test_the_token_of_an_account_is_for_all_resources(
    azurite_settings: StorageSettings, owner: Storage
):
    token = generate_account_sas(
        **account_of(azurite_settings),
        resource_types=ResourceTypes(container=True, object=True),
        permission=AccountSasPermissions.from_string("rwdlacup"),
        expiry=datetime.now(UTC) + ONE_HOUR,
        services=Services(blob=True, queue=True),
    )
    for text in (token, f"?{token}", json.dumps({"queue": token})):
        settings = azurite_settings.model_copy(
            update={"storage": endpoints(azurite_settings), "sas": SecretStr(text)}
        )
        async with AzureStorage(settings, NEVER) as storage:
            await storage.check()
            await storage.files.check()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sp=rup", "it is neither JSON nor a token"),
        ("{", "Invalid JSON"),
        (
            "{}",
            "a token of queue, queue_high, queue_low, poison, blob, packs, files is missing",
        ),
        ('{"blob": "sig"}', "blob: is not a SAS token"),
    ],
)
def test_a_setting_without_tokens_is_one_line(text: str, complaint: str):
    settings = StorageSettings(storage="https://fleet.blob.core.windows.net", sas=text)
    with pytest.raises(errors.SetupError, match=complaint) as caught:
        open_storage(settings)
    assert caught.value.message.startswith("IMAGEFLEET_SAS holds no SAS tokens: ")
    assert "\n" not in caught.value.message


async def test_neither_messages_nor_tracebacks_show_a_token(
    azurite_settings: StorageSettings, faulty_azurite: object, unused_tcp_port: int
):
    token = queue_sas(azurite_settings, azurite_settings.queue, "raup")
    signature = token.split("sig=")[1][:20]
    nobody = f"http://127.0.0.1:{unused_tcp_port}/devstoreaccount1"
    settings = azurite_settings.model_copy(
        update={
            "storage": f"BlobEndpoint={nobody};QueueEndpoint={nobody}",
            "sas": SecretStr(json.dumps({"queue": token})),
        }
    )
    async with AzureStorage(settings, NEVER) as storage:
        with pytest.raises(errors.TransientError) as caught:
            await storage.queue.depth()
        assert signature not in "".join(traceback.format_exception(caught.value))
        assert signature not in storage.url

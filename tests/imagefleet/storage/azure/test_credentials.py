"""Account keys and SAS tokens with restricted permissions."""

from __future__ import annotations

import re
import traceback
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.queue import QueueSasPermissions, generate_queue_sas
from pydantic import SecretStr

from imagefleet import errors
from imagefleet.retry import NEVER
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import open_storage
from imagefleet.storage.protocol import Storage
from imagefleet.storage.settings import StorageSettings

ONE_HOUR = timedelta(hours=1)


def endpoints(settings: StorageSettings) -> str:
    """The connection string without its key."""
    return ";".join(re.findall(r"\w+Endpoint=[^;]+", settings.storage))


def account_of(settings: StorageSettings) -> dict[str, str]:
    name, key = re.findall(r"Account(?:Name|Key)=([^;]+)", settings.storage)
    return {"account_name": name, "account_key": key}


def queue_sas(
    settings: StorageSettings, queue: str, permissions: str, *, expires_in: timedelta = ONE_HOUR
) -> SecretStr:
    return SecretStr(
        generate_queue_sas(
            **account_of(settings),
            queue_name=queue,
            permission=QueueSasPermissions.from_string(permissions),
            expiry=datetime.now(UTC) + expires_in,
        )
    )


def container_sas(
    settings: StorageSettings, permissions: str, container: str | None = None
) -> SecretStr:
    return SecretStr(
        generate_container_sas(
            **account_of(settings),
            container_name=container or settings.container,
            permission=ContainerSasPermissions.from_string(permissions),
            expiry=datetime.now(UTC) + ONE_HOUR,
        )
    )


def with_tokens(settings: StorageSettings, **tokens: SecretStr) -> StorageSettings:
    return settings.model_copy(update={"storage": endpoints(settings), **tokens})


@pytest.fixture
async def owner(azurite_settings: StorageSettings) -> AsyncIterator[Storage]:
    """The storage, opened with the account's key."""
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        yield storage


async def test_a_missing_container_is_detected_with_a_sas_token(
    azurite_settings: StorageSettings, owner: Storage
) -> None:
    """A container's SAS token cannot read the properties of the container."""
    settings = with_tokens(
        azurite_settings.model_copy(update={"container": "no-such-container"}),
        queue_sas=queue_sas(azurite_settings, azurite_settings.queue, "raup"),
        poison_sas=queue_sas(azurite_settings, azurite_settings.poison_queue, "a"),
        blob_sas=container_sas(azurite_settings, "rc", "no-such-container"),
    )
    async with AzureStorage(settings, NEVER) as storage:
        with pytest.raises(errors.SetupError, match="'no-such-container' does not exist"):
            await storage.check()


async def test_a_token_that_may_only_create_does_no_more(
    azurite_settings: StorageSettings, owner: Storage
) -> None:
    settings = with_tokens(
        azurite_settings,
        queue_sas=queue_sas(azurite_settings, azurite_settings.queue, "pu"),
        blob_sas=container_sas(azurite_settings, "c"),
    )
    async with AzureStorage(settings, NEVER) as storage:
        await storage.blobs.check()
        assert await storage.blobs.create("fox.png", b"pixels", "image/png", {})
        with pytest.raises(errors.SetupError, match="AuthorizationPermissionMismatch"):
            await storage.blobs.read("fox.png")
        assert not await storage.blobs.delete("fox.png")


async def test_an_expired_token_is_refused_by_the_check(
    azurite_settings: StorageSettings, owner: Storage
) -> None:
    expired = queue_sas(azurite_settings, azurite_settings.queue, "pu", expires_in=-ONE_HOUR)
    async with AzureStorage(with_tokens(azurite_settings, queue_sas=expired), NEVER) as storage:
        with pytest.raises(errors.SetupError, match=r"expired on .* UTC, 1 hour ago"):
            await storage.check()


@pytest.mark.parametrize("key", ["a2V5", "not base64!"])
async def test_a_wrong_key_is_refused_by_the_check(
    azurite_settings: StorageSettings, key: str
) -> None:
    address = re.sub(r"AccountKey=[^;]+", f"AccountKey={key}", azurite_settings.storage)
    settings = azurite_settings.model_copy(update={"storage": address})
    with pytest.raises(errors.SetupError, match="key") as caught:
        async with AzureStorage(settings, NEVER) as storage:
            await storage.check()
    assert key not in caught.value.message


async def test_the_queues_token_is_used_if_there_is_no_other(
    azurite_settings: StorageSettings, owner: Storage
) -> None:
    settings = with_tokens(
        azurite_settings,
        queue_sas=queue_sas(azurite_settings, azurite_settings.queue, "raup"),
        poison_sas=None,
    )
    async with AzureStorage(settings, NEVER) as storage:
        await storage.queue.check()
        # It is sent to the poison queue, too, which refuses it.
        with pytest.raises(errors.SetupError, match="poison"):
            await storage.poison.check()


async def test_neither_messages_nor_tracebacks_show_a_token(
    azurite_settings: StorageSettings, faulty_azurite: object, unused_tcp_port: int
) -> None:
    token = queue_sas(azurite_settings, azurite_settings.queue, "raup")
    signature = token.get_secret_value().split("sig=")[1][:20]
    nobody = f"http://127.0.0.1:{unused_tcp_port}/devstoreaccount1"
    settings = azurite_settings.model_copy(
        update={"storage": f"BlobEndpoint={nobody};QueueEndpoint={nobody}", "queue_sas": token}
    )
    async with AzureStorage(settings, NEVER) as storage:
        with pytest.raises(errors.TransientError) as caught:
            await storage.queue.depth()
        assert signature not in "".join(traceback.format_exception(caught.value))
        assert signature not in storage.url

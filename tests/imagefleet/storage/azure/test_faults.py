"""Azure Storage behind a faulty network: what is retried, and which errors are raised."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import polling
from imagefleet import errors
from imagefleet.concurrency import NEVER, RetryPolicy
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.queue import MOST_SENDS
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.settings import StorageSettings

LEASE_SECONDS = 30


async def _names(azure_storage: AzureStorage) -> list[str]:
    return [name async for name in azure_storage.blobs.names()]


CALLS: dict[str, Callable[[AzureStorage], Awaitable[Any]]] = {
    "send": lambda azure_storage: azure_storage.queue.send(["a job"]),
    "receive": lambda azure_storage: azure_storage.queue.receive(1, LEASE_SECONDS),
    "depth": lambda azure_storage: azure_storage.queue.depth(),
    "check": lambda azure_storage: azure_storage.check(),
    "create": lambda azure_storage: azure_storage.create(),
    "create blob": lambda azure_storage: azure_storage.blobs.create(
        "fox.png", b"pixels", "image/png", {}
    ),
    "read blob": lambda azure_storage: azure_storage.blobs.read("none.png"),
    "list blobs": _names,
}

TRANSIENT_FAULTS = [500, 502, 503, 504, 429, 408, 409, "drop", "garbage", "hang"]


@pytest.fixture
def retried() -> list[errors.TransientError]:
    """The errors that were retried."""
    return []


@pytest.fixture
def read_timeout_seconds() -> float:
    """Long enough for a reply on a busy machine."""
    return 20.0


@pytest.fixture
async def azure_storage(
    azurite_settings: StorageSettings,
    faulty_azurite,
    retried: list[errors.TransientError],
    read_timeout_seconds: float,
) -> AsyncIterator[AzureStorage]:
    """Azure Storage behind the faulty proxy; makes three attempts."""
    policy = RetryPolicy(
        tries=3,
        first_wait_seconds=0.001,
        longest_wait_seconds=0.002,
        on_retry=retried.append,
    )
    settings = azurite_settings.model_copy(update={"storage": faulty_azurite.address})
    async with AzureStorage(
        settings, policy, read_timeout_seconds=read_timeout_seconds
    ) as azure_storage:
        await azure_storage.create()
        yield azure_storage


# Transient and lasting faults


@pytest.mark.parametrize("fault", [500, 503, 429, "drop"])
async def test_a_transient_fault_is_retried_and_reported(
    azure_storage: AzureStorage,
    faulty_azurite,
    retried: list[errors.TransientError],
    fault,
):
    for name, call in CALLS.items():
        retried.clear()
        faulty_azurite.faults.extend([fault, fault])
        await call(azure_storage)
        assert len(retried) == 2, name


async def test_each_retry_is_an_operation(azure_storage: AzureStorage, faulty_azurite):
    operations = azure_storage.operations
    before = dataclasses.replace(operations)
    for call in (CALLS["send"], CALLS["create blob"], CALLS["read blob"]):
        faulty_azurite.faults.extend([503, "drop"])
        await call(azure_storage)
    assert operations.queue - before.queue == 3
    assert operations.blob_writes - before.blob_writes == 3
    assert operations.blob_reads - before.blob_reads == 3


async def test_a_malformed_answer_is_retried(
    azure_storage: AzureStorage,
    faulty_azurite,
    retried: list[errors.TransientError],
):
    for call in ("send", "receive", "create blob", "list blobs"):
        retried.clear()
        faulty_azurite.faults.append("garbage")
        await CALLS[call](azure_storage)
        assert len(retried) == 1, call


@pytest.mark.parametrize("read_timeout_seconds", [1.0])  # for the fault "hang"
async def test_a_lasting_fault_is_raised_as_a_transient_error_that_names_it(
    azure_storage: AzureStorage, faulty_azurite
):
    for fault in TRANSIENT_FAULTS:
        faulty_azurite.faults.extend([fault] * 3)
        with pytest.raises(errors.TransientError) as caught:
            await azure_storage.queue.receive(1, LEASE_SECONDS)
        assert azure_storage.queue.name in caught.value.message
        if isinstance(fault, int):
            assert f"HTTP {fault}" in caught.value.message
        assert await azure_storage.queue.receive(1, LEASE_SECONDS) == [], fault


async def test_an_unreachable_address_is_a_transient_error(
    azurite_settings: StorageSettings, unused_tcp_port: int
):
    url = f"http://127.0.0.1:{unused_tcp_port}/devstoreaccount1"
    endpoints = f"BlobEndpoint={url};QueueEndpoint={url}"
    address = f"AccountName=devstoreaccount1;AccountKey=a2V5;{endpoints}"
    settings = azurite_settings.model_copy(update={"storage": address})
    async with AzureStorage(settings, NEVER) as azure_storage:
        with pytest.raises(errors.TransientError, match="cannot reach the queue"):
            await azure_storage.check()


async def test_a_misspelt_account_is_named():
    storage = "AccountName=picturs;AccountKey=a2V5;EndpointSuffix=core.windows.invalid"
    async with AzureStorage(StorageSettings(storage=storage), NEVER) as azure_storage:
        with pytest.raises(
            errors.TransientError,
            match=r"no host 'picturs\.queue\..*check the account's name",
        ):
            await azure_storage.check()


# Lost replies


async def test_a_renewal_whose_reply_was_lost_is_unknown_until_the_next_one(
    azure_storage: AzureStorage, faulty_azurite
):
    await azure_storage.queue.send(["a job"])
    (message,) = await azure_storage.queue.receive(1, LEASE_SECONDS)
    faulty_azurite.faults.append("lose reply")
    with pytest.raises(errors.TransientError, match="renewal was lost"):
        await azure_storage.queue.renew(message, LEASE_SECONDS)
    with pytest.raises(errors.LeaseLost):
        await azure_storage.queue.renew(message, LEASE_SECONDS)
    assert (await azure_storage.queue.depth()).messages == 1


@pytest.mark.parametrize("fault", [500, 503, "drop"])
async def test_a_renewal_that_did_not_arrive_is_retried(
    azure_storage: AzureStorage, faulty_azurite, fault
):
    await azure_storage.queue.send(["a job"])
    (message,) = await azure_storage.queue.receive(1, LEASE_SECONDS)
    faulty_azurite.faults.append(fault)
    await azure_storage.queue.delete(
        await azure_storage.queue.renew(message, LEASE_SECONDS)
    )


async def test_a_delete_whose_reply_was_lost_succeeds(
    azure_storage: AzureStorage, faulty_azurite
):
    await azure_storage.queue.send(["a job"])
    (message,) = await azure_storage.queue.receive(1, LEASE_SECONDS)
    faulty_azurite.faults.append("lose reply")
    await azure_storage.queue.delete(message)
    assert (await azure_storage.queue.depth()).messages == 0


async def test_a_release_whose_reply_was_lost_succeeds(
    azure_storage: AzureStorage, faulty_azurite
):
    await azure_storage.queue.send(["a job"])
    (message,) = await azure_storage.queue.receive(1, LEASE_SECONDS)
    faulty_azurite.faults.append("lose reply")
    await azure_storage.queue.release(message)
    assert len(await azure_storage.queue.receive(1, LEASE_SECONDS)) == 1


async def test_a_message_whose_reply_was_lost_is_sent_at_least_once(
    azure_storage: AzureStorage, faulty_azurite
):
    faulty_azurite.faults.append("lose reply")
    await azure_storage.queue.send(["a job"])
    received = await azure_storage.queue.receive(32, LEASE_SECONDS)
    assert {message.body for message in received} == {"a job"}


@pytest.mark.parametrize(
    "faults", [["lose reply"], ["lose reply", 503], [503, "lose reply"]]
)
async def test_a_blob_whose_reply_was_lost_is_created_once_and_is_its_creators(
    azure_storage: AzureStorage, faulty_azurite, faults: list[Any]
):
    faulty_azurite.faults.extend(faults)
    assert await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})
    assert await azure_storage.blobs.read("fox.png") == b"pixels"
    assert not await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})


@pytest.mark.parametrize("fault", [503, 429])
async def test_a_blob_of_another_is_not_taken_for_ones_own_after_a_refused_attempt(
    azure_storage: AzureStorage, faulty_azurite, fault
):
    await azure_storage.blobs.create("fox.png", b"another's", "image/png", {})
    faulty_azurite.faults.append(fault)
    assert not await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})


async def test_an_error_after_a_lost_reply_says_that_the_blob_may_have_been_created(
    azure_storage: AzureStorage, faulty_azurite
):
    """The caller's own retry must know; the last error alone says that nothing was done."""
    for faults, is_unknown in (
        (["lose reply", 503, 503], True),
        ([503, 503, 503], False),
    ):
        faulty_azurite.faults.extend(faults)
        with pytest.raises(errors.TransientError) as caught:
            await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})
        assert caught.value.outcome_is_unknown == is_unknown


async def test_the_size_of_a_blob_is_right_however_its_reply_arrives(
    azure_storage: AzureStorage, faulty_azurite
):
    for name, data in (("none.png", b""), ("fox.png", b"pixels")):
        await azure_storage.blobs.create(name, data, "image/png", {})
        for fault in ("pass", "delay", "slow reply", "truncate"):
            faulty_azurite.faults.append(fault)
            record = await azure_storage.blobs.record(name)
            assert record is not None
            assert record.size_bytes == len(data), fault


async def test_a_file_whose_commits_reply_was_lost_is_uploaded(
    azure_storage: AzureStorage, faulty_azurite, tmp_path
):
    (tmp_path / "model").write_bytes(b"weights")
    # It looks for the blob and for blocks, and sends one block.
    faulty_azurite.faults.extend(["pass", "pass", "pass", "lose reply"])
    stored = await azure_storage.files.upload(
        "models/a", tmp_path / "model", "text/plain", {}
    )
    assert stored
    assert await azure_storage.files.read("models/a") == b"weights"


async def test_messages_in_a_lost_reply_are_visible_again_later(
    azure_storage: AzureStorage, faulty_azurite
):
    await azure_storage.queue.send(["a job"])
    faulty_azurite.faults.append("lose reply")
    normal = azure_storage.queues["normal"]
    assert await normal.receive(1, 1) == []
    (message,) = await polling.until(lambda: normal.receive(1, LEASE_SECONDS))
    assert message.delivery_count == 2


# What is not retried


@pytest.mark.parametrize(
    "code", ["MemoryExtentStoreAtSizeLimit", "ContainerBeingDeleted"]
)
async def test_other_conflicts_do_not_count_as_an_existing_blob(
    azure_storage: AzureStorage, faulty_azurite, code: str
):
    faulty_azurite.faults.extend([(409, code)] * 3)
    with pytest.raises(errors.TransientError, match=code):
        await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})
    assert await azure_storage.blobs.read("fox.png") is None


@pytest.mark.parametrize(
    "answer", [(409, "BlobAlreadyExists"), (403, "UnauthorizedBlobOverwrite")]
)
async def test_an_existing_blob_is_recognized_whatever_the_token_permits(
    azure_storage: AzureStorage, faulty_azurite, answer: tuple[int, str]
):
    faulty_azurite.faults.append(answer)
    assert not await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})


async def test_a_body_too_large_for_azure_is_a_job_error(
    azure_storage: AzureStorage, faulty_azurite
):
    faulty_azurite.faults.append(413)
    with pytest.raises(errors.JobError, match="HTTP 413"):
        await azure_storage.queue.send(["a job"])


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_credentials_are_a_setup_error(
    azure_storage: AzureStorage,
    faulty_azurite,
    retried: list[errors.TransientError],
    status: int,
):
    faulty_azurite.faults.append(status)
    with pytest.raises(
        errors.SetupError,
        match=f"refuses access to the queue '{azure_storage.queue.name}'",
    ):
        await azure_storage.queues["normal"].receive(1, LEASE_SECONDS)
    assert retried == []


async def test_a_failed_send_cancels_the_others(
    azure_storage: AzureStorage, faulty_azurite
):
    faulty_azurite.faults.extend([403] * 100)
    with pytest.raises(errors.SetupError):
        await azure_storage.queue.send(str(number) for number in range(1_000))
    assert faulty_azurite.requests < 2 * MOST_SENDS


@pytest.mark.parametrize("code", sorted(azure_errors.NOT_FOR_TOKENS))
async def test_create_does_nothing_with_a_token_for_one_queue(
    azure_storage: AzureStorage, faulty_azurite, code: str
):
    faulty_azurite.faults.append((403, code))
    await azure_storage.create()  # neither an error nor further requests
    assert not faulty_azurite.faults
    await azure_storage.queue.send(["a job"])


async def test_a_refused_blob_is_not_mistaken_for_an_existing_one(
    azure_storage: AzureStorage, faulty_azurite
):
    faulty_azurite.faults.append((403, "AuthorizationPermissionMismatch"))
    with pytest.raises(errors.SetupError, match="AuthorizationPermissionMismatch"):
        await azure_storage.blobs.create("fox.png", b"pixels", "image/png", {})

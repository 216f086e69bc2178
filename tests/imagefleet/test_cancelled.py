"""The list of cancelled campaigns, on both storages."""

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta

import pytest

from imagefleet import cancelled, errors
from imagefleet.cancelled import CancelledCampaigns
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch) -> None:
    monkeypatch.setattr(cancelled, "LOAD_SECONDS", 1.0)
    monkeypatch.setattr(cancelled, "BLUR_SECONDS", 1.0)  # of one server


async def send_one(storage: Storage) -> datetime:
    """When the storage stamped a new message."""
    await storage.queue.send(["{}"])
    (message,) = await storage.queue.receive(1, 60)
    return message.enqueued_at


async def read(storage: Storage, queue: str | None = None) -> CancelledCampaigns:
    found = CancelledCampaigns(storage.files, queue or storage.queue.name)
    await found.refresh()
    return found


async def write(storage: Storage, *entries: JSONDict) -> None:
    data = json.dumps({"campaigns": entries}).encode()
    assert await storage.files.replace(cancelled.BLOB, data, "application/json", None)


async def test_what_was_sent_before_is_cancelled_and_what_is_sent_later_runs(
    storage: Storage,
):
    before = await send_one(storage)
    at = await cancelled.cancel(storage, "spring")
    after = await send_one(storage)
    found = await read(storage)
    assert found.times == {"spring": at}
    assert found.includes("spring", before)
    assert not found.includes("spring", after)
    assert not found.includes("autumn", before)
    assert not found.includes(None, before)


async def test_jobs_without_a_campaign_are_those_of_default(local_storage: Storage):
    sent_at = await send_one(local_storage)
    await cancelled.cancel(local_storage, "default")
    assert (await read(local_storage)).includes(None, sent_at)


async def test_fleets_that_share_the_files_do_not_cancel_each_others_campaigns(
    local_storage: Storage,
):
    await cancelled.cancel(local_storage, "spring")
    assert (await read(local_storage, "jobs-of-others")).times == {}


@pytest.mark.usefixtures("cancel_at_once")
async def test_two_who_cancel_at_once_both_do(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        await asyncio.gather(
            *(cancelled.cancel(storage, f"c{number}") for number in range(4))
        )
        assert set((await read(storage)).times) == {"c0", "c1", "c2", "c3"}


@pytest.mark.parametrize(
    ("messages", "kept"), [(0, {"spring", "recent"}), (1, {"old", "spring", "recent"})]
)
async def test_an_old_entry_is_dropped_once_no_message_can_be_older(
    local_storage: Storage, messages: int, kept: set[str]
):
    name = local_storage.queue.name
    recently = datetime.now(UTC) - timedelta(days=7)
    await write(
        local_storage,
        {"queue": name, "campaign": "old", "at": LONG_AGO.isoformat()},
        {"queue": name, "campaign": "recent", "at": recently.isoformat()},
        {"queue": "another", "campaign": "old", "at": LONG_AGO.isoformat()},
    )
    await local_storage.queue.send(["{}"] * messages)
    await local_storage.queue.receive(
        1, 60
    )  # a message in flight may be of any campaign
    await cancelled.cancel(local_storage, "spring")
    assert set((await read(local_storage)).times) == kept
    assert set((await read(local_storage, "another")).times) == {"old"}


async def test_a_full_list_says_how_to_empty_it(local_storage: Storage, monkeypatch):
    monkeypatch.setattr(cancelled, "MAX_CAMPAIGNS", 1)
    await cancelled.cancel(local_storage, "spring")
    await cancelled.cancel(local_storage, "spring")
    with pytest.raises(errors.SetupError, match="cancel --all"):
        await cancelled.cancel(local_storage, "autumn")


@pytest.mark.usefixtures("cancel_at_once")
async def test_a_list_that_has_not_changed_is_not_read_again(storage: Storage):
    await cancelled.cancel(storage, "spring")
    found = await read(storage)
    before = storage.operations.blob_reads
    await found.refresh()
    assert storage.operations.blob_reads == before, "it is read every five seconds"
    await found.refresh(older_than_seconds=0)
    assert storage.operations.blob_reads == before + 1
    await cancelled.cancel(storage, "autumn")
    await found.refresh(older_than_seconds=0)
    assert set(found.times) == {"spring", "autumn"}


async def test_a_damaged_list_is_a_warning_and_the_last_one_stays_in_force(
    local_storage: Storage, caplog
):
    await cancelled.cancel(local_storage, "spring")
    found = await read(local_storage)
    part = await local_storage.files.read_part(cancelled.BLOB, 0, 1)
    assert part is not None
    assert await local_storage.files.replace(
        cancelled.BLOB, b"no list", "text/plain", part.version
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await found.refresh(older_than_seconds=0)
    assert set(found.times) == {"spring"}
    assert [getattr(each, "action", "") for each in caplog.records] == [
        "cancelled_unread"
    ]
    with pytest.raises(errors.SetupError, match=r"correct or delete cancelled\.json"):
        await cancelled.cancel(local_storage, "autumn")

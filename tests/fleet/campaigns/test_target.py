"""What commands act on: `CAMPAIGN[/ID]`, and names that do not exist, on both storages."""

import asyncio

import pytest

import sent_jobs
from cli import target
from imagefleet import errors
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused

#: Every command that acts on a campaign that must exist, with what else it needs.
COMMANDS = (
    ("cancel", "nope", "--yes"),
    ("results", "nope"),
    ("export", "nope", "shards"),
    ("report", "nope"),
    ("gallery", "nope", "--no-browser"),
    ("verify", "nope"),
    ("redo", "nope", "--suspect", "--yes"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_unknown_campaign_is_not_acted_on(
    local_settings: StorageSettings, in_process: Imagefleet, command: tuple[str, ...]
):
    async def fill() -> None:
        async with open_storage(local_settings) as storage:
            await storage.create()
            await sent_jobs.note(storage, "note", 5)

    asyncio.run(fill())
    ended = in_process(*command, "--storage", local_settings.storage)
    assert_refused(ended, "campaign 'nope' has no records", "did you mean 'note'?")
    assert "cancelled" not in ended.stdout


@pytest.mark.parametrize(
    "text", ["", "/", "spring/", "/a", "a/b/c", "../a", "-checks/a"]
)
def test_what_is_no_name_is_refused(text: str):
    with pytest.raises(errors.SetupError, match="use 1 to 128 letters"):
        target.read(text)


def test_a_job_is_not_taken_for_a_campaign():
    with pytest.raises(errors.SetupError, match="give its campaign, spring"):
        target.campaign("spring/0001")


async def test_a_campaign_exists_once_it_has_a_message_an_image_or_a_count(
    storage: Storage,
):
    await storage.queue.send(['{"prompt": "a cat", "id": "a", "campaign": "waiting"}'])
    await storage.blobs.create("drawn/a.png", b"pixels", "image/png", {})
    await sent_jobs.note(storage, "loading", 1)
    for name in ("waiting", "drawn", "loading"):
        assert await target.check_campaign(storage, name) is None
    if storage.queue.is_local:
        with pytest.raises(errors.SetupError, match="did you mean 'loading'"):
            await target.check_campaign(storage, "lading")
    else:  # Azure does not show what most messages are
        unsure = await target.check_campaign(storage, "lading")
        assert "Azure shows only the first" in str(unsure)
    await storage.queue.clear()
    with pytest.raises(errors.SetupError, match="did you mean 'loading'"):
        await target.check_campaign(storage, "lading")


def test_an_unknown_job_is_an_error(
    local_settings: StorageSettings, in_process: Imagefleet
):
    async def fill() -> None:
        async with open_storage(local_settings) as storage:
            await storage.create()
            await storage.blobs.create(
                "spring/forest-7.png", b"pixels", "image/png", {}
            )

    asyncio.run(fill())
    for arguments in (("status",), ("redo", "--yes")):
        ended = in_process(
            *arguments, "spring/forst-7", "--storage", local_settings.storage
        )
        assert_refused(ended, "has no image, record or message")

"""Some records are there at once, and all of them in the end, whatever goes wrong."""

import itertools
import math
import sqlite3
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta

import pytest

import sent_jobs
from fleet.gallery import campaign as campaigns
from fleet.gallery.campaign import Campaign
from fleet.gallery.index import Filter, Index
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from stored_images import ImageLog

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
COUNT = 600


def image(number: int) -> Record:
    fields = {
        "id": f"{number:04}",
        "campaign": "spring",
        "blob": f"spring/{number:04}.png",
    }
    at = NOON + timedelta(seconds=number)
    prompt = str(pow(7, 200 + number))  # it cannot be compressed to nothing
    return Record.model_validate(
        fields | {"outcome": "completed", "at": at, "prompt": prompt}
    )


@pytest.fixture
async def storage(
    local_settings: StorageSettings, monkeypatch
) -> AsyncIterator[Storage]:
    """A campaign of three workers that takes many polls to read."""
    monkeypatch.setattr(campaigns, "_RECORDS_AT_ONCE", 50)
    monkeypatch.setattr(campaigns, "_PART_BYTES", 8_000)
    monkeypatch.setattr(campaigns, "_READ_SECONDS", 0.0)
    async with open_storage(local_settings) as opened:
        await opened.create()
        logs = itertools.cycle(
            [ImageLog(opened.blobs, f"worker-{each}") for each in range(3)]
        )
        for first in range(0, COUNT, 10):
            await next(logs).add([image(number) for number in range(first, first + 10)])
        yield opened


def opened(storage: Storage) -> Campaign:
    return Campaign(storage, "spring", 0.0)


async def jobs(campaign: Campaign) -> list[int]:
    view = await campaign.view(Filter())
    found = campaign.index.records(view.seqs.tolist())
    return [int(records[0].id) for records in found.values()]


async def test_some_are_there_at_once_and_the_others_come_in_order(
    storage: Storage,
):
    campaign = opened(storage)
    await campaign.refresh()
    assert 50 <= len(await jobs(campaign)) < COUNT
    assert not campaign.is_complete
    while not campaign.is_complete:
        await campaign.refresh()
        shown = await jobs(campaign)
        assert shown == sorted(shown)
    assert await jobs(campaign) == list(range(COUNT))
    assert campaign.index.counts()[1] == COUNT
    await campaign.close()


async def test_rows_are_those_that_the_page_knows_until_it_asks_what_is_new(
    storage: Storage, monkeypatch
):
    # On a busy machine the rows would be too expensive to be read again so soon.
    monkeypatch.setattr(campaigns, "_SELECT_SHARE", math.inf)
    campaign = opened(storage)
    await campaign.refresh()
    first = await campaign.view(Filter())
    generation = first.generation
    count = len(first.seqs)
    await campaign.refresh()
    known = await campaign.view(Filter(), is_new=False)
    assert (known.generation, len(known.seqs)) == (generation, count)
    while not campaign.is_complete:
        await campaign.refresh()
    assert (await campaign.view(Filter())).generation > generation
    await campaign.close()


async def test_a_long_campaign_is_listed_without_a_look_at_each_image(
    storage: Storage,
):
    waits, made_up, made_up_later, waits_later = range(COUNT, COUNT + 4)
    sent = [f"{number:04}" for number in [*range(COUNT), waits, waits_later]]
    await sent_jobs.note(storage, "spring", len(sent), ids=sent)
    thief = RecordLog(storage.blobs, "thief")
    await thief.add([image(waits), image(made_up)])
    campaign = opened(storage)
    while not campaign.is_complete:
        await campaign.refresh()
    await thief.add([image(made_up_later), image(waits_later)])
    await campaign.refresh()
    assert await jobs(campaign) == [*range(COUNT), waits]
    assert campaign.damaged.count == 3
    await campaign.close()


async def test_a_full_disk_loses_no_record(storage: Storage, monkeypatch):
    real = Index.add
    calls = itertools.count()

    def add(self: Index, records: Iterable[Record], *, at_end: bool = False) -> None:
        if next(calls) in {1, 3, 4}:
            raise sqlite3.OperationalError("database or disk is full")
        real(self, records, at_end=at_end)

    monkeypatch.setattr(Index, "add", add)
    campaign = opened(storage)
    problems = set()
    while not campaign.is_complete:
        await campaign.refresh()
        problems.add(campaign.problem)
    assert await jobs(campaign) == list(range(COUNT))
    assert problems == {
        "",
        "The index of the gallery cannot be written: database or disk is full",
    }
    await campaign.close()

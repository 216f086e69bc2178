"""A score that waits for the campaign's end."""

from typing import Any

import pytest

import sent_jobs
from evaluation.score import session
from imagefleet.records import reader
from imagefleet.records.follower import Follower
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings


class EnoughError(Exception):
    """The campaign was polled often enough."""


async def test_a_campaign_that_goes_on_is_not_counted_at_each_poll(
    local_settings: StorageSettings, monkeypatch
):
    """On Azure that would be a read of each shard every five seconds."""
    polled = list[Follower]()
    counted = list[str]()
    real_counts = reader.counts
    real_poll = Follower.poll

    async def counts(storage: Storage, campaign: str) -> reader.Counts:
        counted.append(campaign)
        return await real_counts(storage, campaign)

    async def poll(follower: Follower) -> list[Any]:
        polled.append(follower)
        if len(polled) > 50:
            raise EnoughError
        return await real_poll(follower)

    monkeypatch.setattr(session, "POLL_SECONDS", 0)
    monkeypatch.setattr(reader, "counts", counts)
    monkeypatch.setattr(Follower, "poll", poll)
    async with open_storage(local_settings) as storage:
        await storage.create()
        await sent_jobs.begin(storage, "spring", 2)
        with pytest.raises(EnoughError):
            await session.until_ended(storage, "spring")

    assert 3 <= len(counted) <= 5

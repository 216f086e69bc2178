"""The table of campaigns."""

from datetime import UTC, datetime, timedelta

import pytest

import sent_jobs
from cli import console
from fleet.campaigns import table
from fleet.campaigns.table import Campaigns
from imagefleet.records import decisions
from imagefleet.records.counts import Counts
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("sent", "completed", "expected"),
    [(300, 185, 2700.0), (300, 285, None), (300, 0, None)],
)
async def test_a_campaigns_columns_add_up_and_it_has_the_time_left_at_its_speed_so_far(
    local_settings: StorageSettings, sent: int, completed: int, expected: float | None
):
    counts = Counts(
        sent=sent,
        images=completed,
        completed=completed,
        failed=0,
        cancelled=0,
        discarded=15 if completed else 0,
        first_at=BEGAN,
        last_at=BEGAN + timedelta(hours=1, minutes=30),
    )
    async with open_storage(local_settings) as storage:
        campaigns = Campaigns(storage, "spring")
        campaigns.rows = [("spring", counts)]

    (record,) = campaigns.records()
    columns = ("completed", "failed", "cancelled", "discarded", "pending")

    assert sum(record[name] for name in columns) == record["sent"]
    assert record["seconds_left"] == expected
    with console.stdout.capture() as printed:
        console.stdout.print(campaigns.table(1))
    assert ("45.0" in printed.get()) is (expected is not None)


async def test_campaigns_that_stand_are_not_read_again(
    local_settings: StorageSettings, monkeypatch
):
    monkeypatch.setattr(table, "_FRESH_SECONDS", 0)
    read = list[str]()
    async with open_storage(local_settings) as storage:
        await storage.create()
        await sent_jobs.begin(storage, "spring", 4)
        await sent_jobs.begin(storage, "autumn", 1)
        campaigns = Campaigns(storage)

        async def pending(campaign: str) -> float | None:
            await campaigns.refresh()
            return dict(campaigns.rows)[campaign].pending

        assert await pending("spring") == 3
        read_settled = decisions.Ends.read_settled

        async def noting(ends: decisions.Ends) -> decisions.Ends:
            read.extend(shard.campaign for shard in ends.shards)
            return await read_settled(ends)

        monkeypatch.setattr(decisions.Ends, "read_settled", noting)
        assert (await pending("autumn"), read) == (0, [])
        await sent_jobs.note(storage, "autumn", 2)
        assert (await pending("autumn"), set(read)) == (2, {"autumn"})

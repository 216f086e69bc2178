"""The table of campaigns."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from cli import console
from fleet.campaigns.table import Campaigns
from imagefleet.records.overview import Counts
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry.metrics import OTHER_MODELS

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


async def test_what_is_left_of_many_campaigns_is_that_of_the_latest_and_one_sum(
    local_settings: StorageSettings,
):
    def counts(sent: int, hours: int) -> Counts:
        times = BEGAN, BEGAN + timedelta(hours=hours)
        return Counts(
            sent, 10, 10, failed=0, cancelled=0, first_at=times[0], last_at=times[1]
        )

    async with open_storage(local_settings) as storage:
        campaigns = Campaigns(storage)
    ended = ("ended", counts(10, 1))
    unknown = ("unknown", replace(ended[1], sent=None))
    unbegun = ("unbegun", replace(counts(5, 1), completed=0, images=0))
    rows = [(f"c{number}", counts(12, number)) for number in range(1, 5)]
    campaigns.rows = [unbegun, ended, *rows, unknown]

    assert campaigns.left(3) == {
        "unbegun": (5, None),
        "c1": (2, 720.0),
        "c2": (2, 1440.0),
        OTHER_MODELS: (4, 2880.0),
    }

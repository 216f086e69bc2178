"""Which jobs a scaler counts where jobs name models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.scale import scaler
from fleet.scale.decision import Goal, Known, decide
from imagefleet.storage.protocol import Storage

GOAL = Goal(
    max_dollars=100,
    max_replicas=12,
    deadline=None,
    dollars_per_hour=1,
    every_seconds=900,
    sample_seconds=60,
)


@pytest.mark.parametrize("storage_settings", ["local"], indirect=True)
@pytest.mark.parametrize(("models", "counted"), [(None, 9), (["ours"], 5), (["none"], 2)])
async def test_jobs_of_models_that_the_fleet_does_not_serve_start_no_replicas(
    storage: Storage, tmp_path: Path, models: list[str] | None, counted: int
) -> None:
    for model, count in (("ours", 3), ("others", 4)):
        await storage.models.send([f'{{"prompt": "a", "model": "{model}"}}'] * count)
    await storage.models.send(['{"prompt": "a"}'] * 2)
    fleet: Any = SimpleNamespace(fleet="f")
    speeds = scaler.Speeds(given=scaler.Speed(1.0, "given"))
    found = scaler.Scaler(GOAL, fleet, storage, tmp_path / "ledger", speeds, models=models)
    assert await found._read_queue(0.0)
    assert found._messages == counted


@pytest.mark.parametrize(
    ("changes", "is_due", "wanted"),
    [
        ({"empty_seconds": 900.0, "replicas": 9}, False, 4),
        ({"empty_seconds": 900.0, "replicas": 0}, True, 4),
        ({"messages": 1}, True, 4),
        ({"messages": 10_000}, True, 11),
        ({"empty_seconds": 900.0, "spent_dollars": 99.99, "replicas": 4}, False, 0),
        ({"empty_seconds": 900.0, "now": 5000.0}, True, 0),
    ],
)
def test_the_fewest_replicas_are_kept_within_budget_and_deadline(
    changes: dict[str, Any], is_due: bool, wanted: int
) -> None:
    goal = replace(GOAL, min_replicas=4, max_replicas=11, dollars_per_hour=None, deadline=4000.0)
    known = Known(
        now=1000.0,
        messages=0,
        empty_seconds=0.0,
        replicas=5,
        running=5,
        spent_dollars=0.0,
        price=0.5,
        quota_free=100,
        jobs_per_second=0.1,
    )
    assert decide(goal, replace(known, **changes), is_due=is_due).replicas == wanted

"""Which jobs a scaler counts where jobs name models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.scale import scaler
from fleet.scale.decision import Goal
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

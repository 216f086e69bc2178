"""Which jobs a scaler counts where jobs name models."""

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.monitor import prometheus
from fleet.salad.file import Model
from fleet.scale import scaler
from fleet.scale.decision import Goal
from imagefleet.pricing import families
from imagefleet.storage.open import Storage
from storages import local_only

GOAL = Goal(
    max_dollars=100,
    max_replicas=12,
    deadline=None,
    dollars_per_hour=1,
    every_seconds=900,
    sample_seconds=60,
)


@local_only
@pytest.mark.parametrize(
    ("models", "counted"), [(None, 9), (["ours"], 5), (["none"], 2)]
)
async def test_jobs_of_models_that_the_fleet_does_not_serve_start_no_replicas(
    storage: Storage, tmp_path, models: list[str] | None, counted: int
):
    for model, count in (("ours", 3), ("others", 4)):
        await storage.models.send([f'{{"prompt": "a", "model": "{model}"}}'] * count)
    await storage.models.send(['{"prompt": "a"}'] * 2)
    fleet: Any = SimpleNamespace(fleet="f")
    speeds = scaler.Speeds(given=scaler.Speed(1.0, "given"))
    found = scaler.Scaler(
        replace(GOAL, models=models), fleet, storage, tmp_path / "ledger", speeds
    )
    await found._read_queue(0.0)
    assert found._messages == counted


SD1_AND_SDXL = [
    Model(name, families.find(slug), name)
    for name, slug in (("small", "sd1"), ("large", "sdxl"))
]


class Deployment:
    """A fleet without replicas, and room for many."""

    fleet = "f"

    def __init__(self) -> None:
        self.client = self

    async def existing_groups(self) -> list[Any]:
        group = SimpleNamespace(live_replicas=0, running=0)
        return [
            SimpleNamespace(**vars(group), price=lambda _: SimpleNamespace(most=0.01))
        ] * 4

    async def gpu_classes(self) -> list[Any]:
        return []

    async def quota(self) -> Any:
        return SimpleNamespace(free=2000)


@local_only
async def test_a_job_of_sdxl_counts_by_its_seconds_of_work(
    storage: Storage, tmp_path, monkeypatch
):
    """A queue takes ten times the replicas if it is of SDXL."""
    monkeypatch.setattr(scaler.salad_groups, "is_rolling", lambda _: False)
    goal = replace(GOAL, max_replicas=1000, dollars_per_hour=None, deadline=900.0)
    wanted = {}
    for model in ("small", "large"):
        await storage.models.send([f'{{"prompt": "a", "model": "{model}"}}'] * 800)
        fleet: Any = Deployment()
        speeds = scaler.Speeds(given=scaler.Speed(0.1, "given"), models=SD1_AND_SDXL)
        scaling = scaler.Scaler(
            replace(goal, models=[model]),
            fleet,
            storage,
            tmp_path / model,
            speeds,
            is_dry_run=True,
            wall_clock=lambda: 0.0,
        )
        wanted[model] = (await scaling.step())["wanted"]
    assert wanted == {"small": 10, "large": 102}


async def test_speeds_that_workers_report_count_their_models():
    class Metrics:
        async def at(self, query: str, _: datetime) -> list[prometheus.Series]:
            rates = {"small": 0.5, "large": 0.25}
            return [
                prometheus.Series(metric={"model": m}, value=(0, rates[m]))
                for m in rates
            ]

    server: Any = Metrics()
    speed = await scaler.Speeds(server=server, models=SD1_AND_SDXL).find()
    of_sdxl = 1 / families.find("sdxl").images_per_second(1)
    assert speed.jobs_per_second == pytest.approx(0.5 + 0.25 * of_sdxl)

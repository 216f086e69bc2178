"""`imagefleet plan` before a small fleet, and what the fleet paid afterwards, in simulated time.

The fleet runs the worker's own pipeline; its engine draws at the rates of the measurements.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefleet.pricing import prices
from imagefleet.validation import JSONDict
from in_process import Imagefleet, told
from simulation import engine, fleet, measure
from simulation.fleet import Scenario
from simulation.nodes import Card, Weather

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

#: As a consumer card may be: a tenth of the measured one's speed.
SPEED = 0.1

REPLICAS = 3
DOLLARS_PER_HOUR = 0.36

START_UP_SECONDS = 60.0

#: What each replica draws at full speed.
WORK_SECONDS = 300.0

#: Nobody is interrupted, slow or broken.
FAIR = Weather(0, 0, 0)


class ColdEngine(engine.SimulatedEngine):
    """Draws at a share of its speed until it has compiled all, as a fresh node does."""

    warm_up = prices.WARM_UPS["like_jobs"]

    def __init__(self, images_per_second: float, *, is_broken: bool = False) -> None:
        super().__init__(images_per_second, is_broken=is_broken)
        self._began_at = time.monotonic()

    @property
    def tick_seconds(self) -> float:
        is_cold = time.monotonic() - self._began_at < self.warm_up.full_speed_seconds
        return super().tick_seconds / (self.warm_up.speed if is_cold else 1.0)


@pytest.fixture
def rates() -> dict[str, float]:
    """Images/s by kind of job."""
    few = json.loads((RESULTS / "few-steps-h100.json").read_text())
    engine_rows = json.loads((RESULTS / "engine-h200.json").read_text())
    plain = few["no_lora_images_per_second"]
    found = {
        "uniform": plain,
        "a LoRA a job": plain * engine_rows["mixed_over_no_lora"],
        "few steps": few["sd15_4_steps_images_per_second"],
        "few steps, a LoRA a job": few["sd15_4_steps_lora_images_per_second"],
    }
    return {kind: rate * SPEED for kind, rate in found.items()}


@pytest.fixture
def paid(monkeypatch) -> Callable[..., measure.Figures]:
    """Figures of a fleet that draws so many jobs; each replica begins when it is billed."""
    monkeypatch.setattr(fleet, "SPREAD_SECONDS", 0.0)

    def run(rate: float, jobs: int, start_up_seconds: float) -> measure.Figures:
        monkeypatch.setattr(fleet, "START_UP_SECONDS", start_up_seconds)
        card = Card("mine", rate, DOLLARS_PER_HOUR)
        return measure.measure(Scenario(REPLICAS, [card], FAIR, jobs=jobs), 0, 40_000)

    return run


def planned(in_process: Imagefleet, *arguments: str) -> JSONDict:
    more = ("--gpu", f"mine={REPLICAS}", "--price-per-hour", str(DOLLARS_PER_HOUR))
    result = in_process("plan", *arguments, *more, "--json")
    return told(result)


@pytest.mark.parametrize(
    "kind", ["uniform", "a LoRA a job", "few steps", "few steps, a LoRA a job"]
)
def test_a_fleet_pays_what_its_plan_said_by_a_report_of_other_jobs(
    kind: str,
    in_process: Imagefleet,
    rates: dict[str, float],
    paid: Callable[..., measure.Figures],
    tmp_path,
):
    report = {
        "model": "SD1.5",
        "width": 512,
        "height": 512,
        "steps": 15,
        "ready_seconds": START_UP_SECONDS,
        "worker_images_per_second": rates["a LoRA a job"],
        "hardware": {"device": "mine"},
    }
    (tmp_path / "bench.json").write_text(json.dumps(report))
    job: JSONDict = {"width": 512, "height": 512, "steps": 15, "cfg_scale": 7}
    if "few steps" in kind:
        job |= {"steps": 4, "cfg_scale": 1}
    jobs = round(REPLICAS * rates[kind] * WORK_SECONDS)
    with (tmp_path / "jobs.jsonl").open("w") as file:
        for number in range(jobs):
            lora = f" <lora:style-{number}:1>" if "LoRA" in kind else ""
            file.write(json.dumps({"prompt": f"a house{lora}", **job}) + "\n")

    given = ("--bench", str(tmp_path / "bench.json"))
    before = planned(in_process, str(tmp_path / "jobs.jsonl"), *given)
    after = paid(rates[kind], jobs, START_UP_SECONDS)

    assert (after.images, after.lost) == (jobs, 0)
    assert before["gpu_dollars"] == pytest.approx(after.dollars, rel=0.1)


def test_without_a_report_a_cold_fleets_start_is_in_its_plan(
    in_process: Imagefleet,
    rates: dict[str, float],
    paid: Callable[..., measure.Figures],
    monkeypatch,
):
    monkeypatch.setattr(engine, "SimulatedEngine", ColdEngine)
    rate = rates["uniform"]
    jobs = round(REPLICAS * rate * WORK_SECONDS)

    before = planned(in_process, "--jobs", str(jobs), "--images-per-second", str(rate))
    after = paid(rate, jobs, ColdEngine.warm_up.first_image_seconds)

    assert before["gpu_dollars"] == pytest.approx(after.dollars, rel=0.1)
    without = before["gpu_dollars"] - before["start_up_dollars"]
    assert without < 0.9 * after.dollars

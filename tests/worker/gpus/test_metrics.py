import re
import time

import pytest

from imagefleet.telemetry.metrics import render
from worker.gpus.parent import MachineMetrics


class Clock:
    """time.monotonic, which the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def values(metrics: MachineMetrics) -> dict[str, float]:
    """Each series as Prometheus writes it."""
    lines = render(metrics.registry).decode().splitlines()
    return {
        re.sub(',process="[^"]*"', "", name): float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_a_gpu_without_a_worker_costs_its_share_of_the_machine(clock: Clock):
    """Each GPU costs $2/h for two hours: its worker counts while it runs, the parent else."""
    metrics = MachineMetrics("f", ["0", "1"], 2.0)
    for gpu in "01":
        metrics.is_up(gpu)
    clock.now += 1800
    before = values(metrics)
    assert before['imagefleet_cost_dollars_total{fleet="f",kind="gpu"}'] == 0
    assert before['imagefleet_price_dollars_per_hour{fleet="f"}'] == 0
    metrics.is_down("1")
    clock.now += 1800
    down = values(metrics)
    assert down['imagefleet_cost_dollars_total{fleet="f",kind="gpu"}'] == pytest.approx(
        1.0
    )
    assert down[
        'imagefleet_wasted_dollars_total{fleet="f",reason="down"}'
    ] == pytest.approx(1.0)
    assert down['imagefleet_price_dollars_per_hour{fleet="f"}'] == 2.0
    assert down['imagefleet_gpu_up{device="0",fleet="f"}'] == 1
    assert down['imagefleet_gpu_up{device="1",fleet="f"}'] == 0
    metrics.restarts.labels("1").inc()
    metrics.is_up("1")
    clock.now += 1800
    metrics.is_down("1")
    clock.now += 1800
    again = values(metrics)
    assert again[
        'imagefleet_cost_dollars_total{fleet="f",kind="gpu"}'
    ] == pytest.approx(2.0)
    assert again['imagefleet_gpu_restarts_total{device="1",fleet="f"}'] == 1


def test_without_a_price_a_gpu_without_a_worker_costs_nothing():
    metrics = MachineMetrics("f", ["0", "1"], None)
    assert not any("dollars" in name for name in values(metrics))

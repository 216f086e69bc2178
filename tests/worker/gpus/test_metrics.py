import re
import time
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from imagefleet.telemetry.metrics import render
from worker.gpus.parent import MachineMetrics, merged
from worker.metrics import WorkerMetrics


class Clock:
    """time.monotonic, which the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def values(metrics: MachineMetrics) -> dict[str, float]:
    """Each series as Prometheus writes it."""
    lines = render(metrics.registry).decode().splitlines()
    return {
        re.sub(',process="[^"]*"', "", name): float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def worker_text(device: str, images: int) -> str:
    metrics = WorkerMetrics("f", device)
    metrics.images.inc(images)
    metrics.stage_seconds["generate"].observe(0.1)
    metrics.set_worker_info(worker=f"m-gpu{device}", gpu='RTX "4090"\n')
    return render(metrics.registry).decode()


def test_two_workers_and_their_parent_make_one_text_with_each_family_once() -> None:
    own = MachineMetrics("f", ["0", "1"], 0.5)
    texts = [worker_text("0", 3), worker_text("1", 4)]

    text = merged(own.registry, texts).decode()

    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) > 10
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert {
        each.labels["device"]: each.value
        for each in families["imagefleet_images"].samples
    } == {"0": 3, "1": 4}
    assert families["imagefleet_images"].type == "counter"
    assert families["imagefleet_stage_seconds"].type == "histogram"
    counts = Counter(
        (sample.name, *sorted(sample.labels.items()))
        for family in families.values()
        for sample in family.samples
    )
    assert set(counts.values()) == {1}
    for given in texts:
        for line in given.splitlines():
            assert line in text.splitlines()


def test_a_gpu_without_a_worker_costs_its_share_of_the_machine(clock: Clock) -> None:
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


def test_the_price_of_a_gpu_is_its_workers_where_none_is_given(clock: Clock) -> None:
    metrics = MachineMetrics("f", ["0", "1"], None)
    assert not any("dollars" in name for name in values(metrics))
    for gpu in "01":
        metrics.is_up(gpu)
    price = 'imagefleet_price_dollars_per_hour{device="1"} 3.6\n'
    metrics.read("1", price + 'imagefleet_slots{state="busy"} 7\n')
    assert metrics.busy_slots == 7
    metrics.is_down("1")
    clock.now += 1000
    assert metrics.busy_slots == 0
    cost = values(metrics)['imagefleet_cost_dollars_total{fleet="f",kind="gpu"}']
    assert cost == pytest.approx(1.0)

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from evaluation.stand_in import StandInEngine
from imagefleet import errors
from worker.engine import contract
from worker.metrics import NodeFault, WorkerMetrics
from worker.node import start_up
from worker.node.start_up import StartUpCheck
from worker.node.watchdog import NodeLimits, broken_below, limits_of
from worker.settings import WorkerSettings

#: The time of the tests, in which only drawing takes any, however busy the machine.
CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "time", SimpleNamespace(monotonic=lambda: CLOCK.now))


class Batches:
    """Counts the images of a stand-in engine, which takes so long for each batch of one."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.count = 0

    def draw(self, request: contract.ImageRequest) -> contract.Pixels:
        CLOCK.now += self.seconds[min(self.count, len(self.seconds) - 1)]
        self.count += 1
        return np.zeros((request.height, request.width, 3), np.uint8)

    def load(self) -> contract.Engine:
        return StandInEngine(capacity=1, draw=self.draw)


Check = Callable[..., StartUpCheck]


def settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(model=Path("m"), **changes)


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def make(
        device: str = "cpu", metrics: WorkerMetrics | None = None, **limits: Any
    ) -> StartUpCheck:
        return StartUpCheck(
            settings(device=device, cache=tmp_path),
            NodeLimits(**limits),
            metrics or WorkerMetrics(),
        )

    return make


@pytest.mark.parametrize(
    ("seconds", "least", "count"),
    [
        ([0.0], 5, 1),
        ([0.0], 0, 0),  # without a limit nothing is drawn
        ([0.3, 0.3, 0.3, 0.0], 10, 4),  # the first batch does not count
    ],
)
def test_a_node_draws_until_it_is_fast_enough(
    check: Check, seconds: list[float], least: float, count: int
) -> None:
    batches = Batches(*seconds)
    found = check(images_per_second=least)
    found.load(batches.load)

    assert batches.count == count
    assert found.findings.get("images_per_second", least) >= least


def test_a_node_is_not_given_up_since_it_is_not_compiled_yet(check: Check) -> None:
    batches = Batches(0.15)
    engine: Any = batches.load()
    engine.is_compiling = True
    check(images_per_second=10).load(lambda: engine)

    assert batches.count == 1
    with pytest.raises(errors.NodeError, match=r"images/s, less than 10"):
        check(images_per_second=20).load(lambda: engine)


def test_a_node_that_is_slow_three_times_after_its_first_batch_is_broken(
    check: Check,
) -> None:
    batches = Batches(0.15)
    with pytest.raises(errors.NodeError, match=r"images/s, less than 10"):
        check(images_per_second=10).load(batches.load)

    assert batches.count == 1 + 3


async def test_the_findings_are_one_log_line_and_the_metrics(
    check: Check, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = check(images_per_second=1)
    assert list(found.collect()) == []
    async with found.limited():
        found.load(Batches(0.0).load)

    (facts,) = (
        vars(line)
        for line in caplog.records
        if vars(line).get("action") == "node_check"
    )
    assert facts["passed"] is True
    assert facts["images_per_second"] > 1
    assert facts["free_disk_bytes"] > 0
    assert facts["limits"]["images_per_second"] == 1
    samples = {family.name: family.samples[0].value for family in found.collect()}
    assert samples["imagefleet_node_check_passed"] == 1
    images_per_second = samples["imagefleet_node_check_images_per_second"]
    assert images_per_second == facts["images_per_second"]
    assert "imagefleet_node_check_free_gpu_bytes" not in samples


@pytest.mark.parametrize(
    ("limits", "error", "fault"),
    [
        ({"free_disk_bytes": 2**60}, "disk", "disk"),
        ({"images_per_second": 1e9}, "images/s, less than", "gpu_speed"),
        ({"start_up_seconds": 0.01}, "--start-up-seconds", "start_up_time"),
        ({}, "the GPU miscalculates", "engine"),
    ],
)
async def test_the_error_and_the_metrics_say_which_check_failed(
    check: Check, limits: dict[str, float], error: str, fault: str
) -> None:
    metrics = WorkerMetrics()
    node = check(metrics=metrics, **limits)

    async def start_up() -> None:
        async with node.limited():
            node.load(Batches(0.0).load)
            if limits:
                await asyncio.Event().wait()
            raise errors.NodeError("the GPU miscalculates")

    with pytest.raises(errors.NodeError, match=error):
        await start_up()

    count = metrics.registry.get_sample_value
    for each in get_args(NodeFault):
        counted = count("imagefleet_node_faults_total", {"fault": each})
        assert counted == (each == fault)
    assert node.findings["passed"] is False


def test_a_rented_gpu_that_torch_cannot_use_is_a_broken_node_and_not_a_cpu(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    batches = Batches(0.0)
    for device in ("auto", "cuda:7"):  # without a limit, loading the engine reports it
        check(device=device).load(batches.load)
    with pytest.raises(errors.NodeError, match="no CUDA GPU"):
        check(device="auto", free_gpu_bytes=1).load(batches.load)


def test_limits_are_those_that_are_set_and_on_saladcloud_an_eighth_of_the_classs_record() -> (
    None
):
    assert limits_of(settings(), "RTX 4090 24GB", on_salad=False) == NodeLimits()
    given = settings(min_images_per_second=2, start_up_seconds=4)
    assert limits_of(given, "none", on_salad=False) == NodeLimits(2, 0, 4)
    limits = limits_of(settings(), "RTX 3060 Ti 8GB", on_salad=True)
    assert limits.images_per_second == pytest.approx(0.83 / 8)
    assert limits.upload_bits_per_second == 2e6
    assert limits.start_up_seconds == 1200
    off = settings(min_images_per_second=0, start_up_seconds=0)
    switched_off = limits_of(off, "RTX 3060 Ti 8GB", on_salad=True)
    assert switched_off.images_per_second == 0
    assert switched_off.start_up_seconds == 0


def test_a_class_without_a_record_has_a_low_limit_and_an_unknown_card_none() -> None:
    assert broken_below("RTX 3050 8GB") == pytest.approx(0.6 / 8)
    assert broken_below("H200") == broken_below("none") == broken_below("GTX 1050") == 0

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.stand_in import StandInEngine
from imagefleet import errors
from worker.metrics import NodeFault, WorkerMetrics
from worker.node.start_up import StartUpCheck
from worker.node.watchdog import NodeLimits, broken_below, limits_of
from worker.settings import WorkerSettings

Check = Callable[..., StartUpCheck]


def settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(model=Path("m"), **changes)


@pytest.fixture
def check(tmp_path) -> Check:
    def make(
        device: str = "cpu", metrics: WorkerMetrics | None = None, **limits: Any
    ) -> StartUpCheck:
        return StartUpCheck(
            settings(device=device, cache=tmp_path),
            NodeLimits(**limits),
            metrics or WorkerMetrics(),
        )

    return make


async def test_a_check_that_passed_is_one_log_line(check: Check, caplog):
    caplog.set_level("INFO")
    found = check(start_up_seconds=100)
    async with found.limited():
        found.load(StandInEngine)

    (facts,) = (
        vars(line)
        for line in caplog.records
        if vars(line).get("action") == "node_check"
    )
    assert facts["limits"]["start_up_seconds"] == 100
    assert "passed" in facts["message"]


@pytest.mark.parametrize(
    ("limits", "error", "fault"),
    [
        ({"start_up_seconds": 0.01}, "--start-up-seconds", "start_up_time"),
        ({}, "the GPU miscalculates", "engine"),
    ],
)
async def test_the_error_and_the_metrics_say_which_check_failed(
    check: Check, limits: dict[str, float], error: str, fault: str
):
    metrics = WorkerMetrics()
    node = check(metrics=metrics, **limits)

    async def start_up() -> None:
        async with node.limited():
            node.load(StandInEngine)
            if limits:
                await asyncio.Event().wait()
            raise errors.NodeError("the GPU miscalculates")

    with pytest.raises(errors.NodeError, match=error):
        await start_up()

    count = metrics.registry.get_sample_value
    for each in get_args(NodeFault):
        counted = count("imagefleet_node_faults_total", {"fault": each})
        assert counted == (each == fault)
    assert count("imagefleet_node_check_passed") == 0


def test_a_rented_gpu_that_torch_cannot_use_is_a_broken_node_and_not_a_cpu(
    check: Check, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cuda:7"):  # without a limit, loading the engine reports it
        check(device=device).load(StandInEngine)
    with pytest.raises(errors.NodeError, match="no CUDA GPU"):
        check(device="auto", free_gpu_bytes=1).load(StandInEngine)


def test_limits_are_those_that_are_set_and_on_saladcloud_an_eighth_of_the_classs_record():
    assert limits_of(settings(), "RTX 4090 24GB", on_salad=False) == NodeLimits()
    given = settings(min_images_per_second=2, start_up_seconds=4)
    assert limits_of(given, "none", on_salad=False) == NodeLimits(2, 4)
    limits = limits_of(settings(), "RTX 3060 Ti 8GB", on_salad=True)
    assert limits.images_per_second == pytest.approx(0.83 / 8)
    assert limits.start_up_seconds == 1200
    off = settings(min_images_per_second=0, start_up_seconds=0)
    switched_off = limits_of(off, "RTX 3060 Ti 8GB", on_salad=True)
    assert switched_off.images_per_second == 0
    assert switched_off.start_up_seconds == 0


def test_a_class_without_a_record_has_a_low_limit_and_an_unknown_card_none():
    assert broken_below("RTX 3050 8GB") == pytest.approx(0.6 / 8)
    assert broken_below("H200") == broken_below("none") == broken_below("GTX 1050") == 0

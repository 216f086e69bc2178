from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imagefleet import errors
from imagefleet.storage.protocol import Storage
from worker.engine import contract
from worker.node import check as node_check
from worker.node.check import NodeCheck
from worker.node.limits import NodeLimits, broken_below, limits_of, standard_images
from worker.settings import WorkerSettings
from worker.testing import StandInEngine

MakeSettings = Callable[..., WorkerSettings]  # the fixture of conftest.py

local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)


class Fills:
    """Counts the images of a stand-in engine, which takes so long for each fill of one."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.count = 0

    def draw(self, request: contract.ImageRequest) -> contract.Pixels:
        time.sleep(self.seconds[min(self.count, len(self.seconds) - 1)])
        self.count += 1
        return np.zeros((request.height, request.width, 3), np.uint8)

    def load(self) -> contract.Engine:
        return StandInEngine(capacity=1, draw=self.draw)


@pytest.fixture
def check(storage: Storage, worker_settings: MakeSettings) -> Callable[..., NodeCheck]:
    def make(blobs: Any = None, device: str = "cpu", **limits: float) -> NodeCheck:
        return NodeCheck(
            blobs or storage.blobs,
            worker_settings(device=device),
            NodeLimits(**limits),  # type: ignore[arg-type]
        )

    return make


@local_only
def test_a_fast_node_draws_once_and_goes_to_work(check: Callable[..., NodeCheck]) -> None:
    fills = Fills(0.0)
    found = check(images_per_second=5)
    found.load(fills.load)

    assert fills.count == 1
    assert found.findings.images_per_second is not None
    assert found.findings.images_per_second > 5


@local_only
def test_a_slow_first_image_says_nothing_of_a_node(check: Callable[..., NodeCheck]) -> None:
    fills = Fills(0.3, 0.3, 0.3, 0.0)
    check(images_per_second=10).load(fills.load)

    assert fills.count == 4


@local_only
def test_a_node_that_is_slow_three_times_after_its_first_image_is_broken(
    check: Callable[..., NodeCheck],
) -> None:
    fills = Fills(0.15)
    with pytest.raises(errors.NodeError, match=r"images/s, less than 10"):
        check(images_per_second=10).load(fills.load)

    assert fills.count == 1 + 3


@local_only
def test_without_a_limit_nothing_is_drawn_or_sent(check: Callable[..., NodeCheck]) -> None:
    fills = Fills(0.0)
    found = check()
    found.load(fills.load)
    asyncio.run(found.upload())

    assert fills.count == 0
    assert found.findings.upload_bits_per_second is None


async def test_the_blob_of_the_check_is_sent_for_real_and_removed(
    storage: Storage, check: Callable[..., NodeCheck]
) -> None:
    found = check(upload_bits_per_second=1e6)
    await found.upload()

    assert found.findings.upload_bits_per_second is not None
    assert found.findings.upload_bits_per_second > 1e6
    assert [name async for name in storage.blobs.names()] == []


class Line:
    """Blobs behind a line that is as slow, or as bad, as it is told."""

    def __init__(self, *seconds: float, error: errors.FleetError | None = None) -> None:
        self.seconds = list(seconds)
        self.blobs = 0
        self.error = error

    @property
    def sent(self) -> int:
        """How often the check has tried."""
        return math.ceil(self.blobs / node_check.UPLOAD_BLOBS)

    async def create(
        self, name: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> bool:
        self.blobs += 1
        if self.error:
            raise self.error
        await asyncio.sleep(self.seconds[min(self.sent, len(self.seconds)) - 1])
        return True

    async def delete(self, name: str) -> bool:
        return False  # what a least-privilege token may do


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "UPLOAD_PAUSE_SECONDS", 0.01)


@local_only
async def test_a_line_that_is_slow_three_times_is_a_broken_node(
    check: Callable[..., NodeCheck], at_once: None
) -> None:
    line = Line(0.2)
    limit = 8 * node_check.UPLOAD_BYTES / 0.1
    with pytest.raises(errors.NodeError, match="--min-upload-megabits"):
        await check(line, upload_bits_per_second=limit).upload()

    assert line.sent == 3


@local_only
async def test_a_line_that_is_slow_once_is_none(
    check: Callable[..., NodeCheck], at_once: None
) -> None:
    line = Line(0.2, 0.0)
    await check(line, upload_bits_per_second=8 * node_check.UPLOAD_BYTES / 0.1).upload()

    assert line.sent == 2


@local_only
async def test_a_line_that_never_ends_is_given_up(
    check: Callable[..., NodeCheck], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_check, "UPLOAD_SLACK_SECONDS", 0.05)
    with pytest.raises(errors.NodeError, match="--min-upload-megabits"):
        await check(Line(60), upload_bits_per_second=8 * node_check.UPLOAD_BYTES / 0.05).upload()


@local_only
@pytest.mark.parametrize("kind", [errors.TransientError, errors.SetupError])
async def test_a_store_that_is_down_is_no_nodes_fault(
    kind: type[errors.FleetError], check: Callable[..., NodeCheck]
) -> None:
    with pytest.raises(kind):
        await check(Line(0, error=kind()), upload_bits_per_second=1.0).upload()


@local_only
async def test_a_start_that_takes_too_long_is_a_broken_node(
    check: Callable[..., NodeCheck], caplog: pytest.LogCaptureFixture
) -> None:
    found = check(start_up_seconds=0.05)
    with pytest.raises(errors.NodeError, match="--start-up-seconds"):
        async with found.within_its_time():
            await asyncio.sleep(10)

    assert found.passed is False
    assert "the node's check failed" in caplog.text


@local_only
async def test_what_was_found_is_one_line_and_the_metrics(
    check: Callable[..., NodeCheck], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = check(images_per_second=1)
    assert list(found.collect()) == []
    async with found.within_its_time():
        found.load(Fills(0.0).load)

    (line,) = [record for record in caplog.records if vars(record).get("action") == "node_check"]
    facts = vars(line)
    assert facts["passed"] is True
    assert facts["images_per_second"] > 1
    assert facts["free_disk_bytes"] > 0
    assert facts["limits"]["images_per_second"] == 1
    told = {family.name: family.samples[0].value for family in found.collect()}
    assert told["imagefleet_node_check_passed"] == 1
    assert told["imagefleet_node_check_images_per_second"] == facts["images_per_second"]
    assert "imagefleet_node_check_free_gpu_bytes" not in told


@local_only
def test_a_full_disk_is_a_broken_node(check: Callable[..., NodeCheck]) -> None:
    with pytest.raises(errors.NodeError, match="disk"):
        check(free_disk_bytes=2**60).load(Fills(0.0).load)


@local_only
def test_a_rented_gpu_that_torch_cannot_use_is_a_broken_node_and_no_cpu(
    check: Callable[..., NodeCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fills = Fills(0.0)
    for device in ("auto", "cuda:7"):  # elsewhere the engine's loading says what is wrong
        check(device=device).load(fills.load)
    with pytest.raises(errors.NodeError, match="no CUDA GPU"):
        check(device="auto", free_gpu_bytes=1).load(fills.load)


def settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(model=Path("m"), **changes)


def test_off_saladcloud_nothing_is_asked_of_a_machine_that_was_not_set() -> None:
    assert limits_of(settings(), "RTX 4090 24GB", on_salad=False) == NodeLimits()
    given = settings(min_images_per_second=2, min_upload_megabits=3, start_up_seconds=4)
    assert limits_of(given, "none", on_salad=False) == NodeLimits(2, 3e6, 4)


def test_on_saladcloud_a_node_is_held_to_an_eighth_of_its_classs_record() -> None:
    limits = limits_of(settings(), "RTX 3060 Ti 8GB", on_salad=True)

    assert limits.images_per_second == pytest.approx(0.83 / 8)
    assert limits.upload_bits_per_second == 2e6
    assert limits.start_up_seconds == 1200
    off = settings(min_images_per_second=0, min_upload_megabits=0, start_up_seconds=0)
    switched_off = limits_of(off, "RTX 3060 Ti 8GB", on_salad=True)
    assert switched_off.images_per_second == switched_off.upload_bits_per_second == 0
    assert switched_off.start_up_seconds == 0


def test_a_class_without_a_record_is_held_to_little_and_an_unknown_card_to_nothing() -> None:
    assert broken_below("RTX 3050 8GB") == pytest.approx(0.6 / 8)
    assert broken_below("H200") == broken_below("none") == broken_below("GTX 1050") == 0


def test_an_image_counts_for_what_it_costs() -> None:
    assert standard_images(15, 512, 512) == 1
    assert standard_images(50, 512, 512) == pytest.approx(3.1, abs=0.05)
    assert standard_images(15, 1024, 1024) == 4

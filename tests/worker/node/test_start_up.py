import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from evaluation.stand_in import StandInEngine
from imagefleet import errors
from imagefleet.storage.open import Storage
from worker.engine import contract
from worker.metrics import NodeFault, WorkerMetrics
from worker.node import start_up
from worker.node.start_up import StartUpCheck
from worker.node.watchdog import NodeLimits, broken_below, limits_of
from worker.settings import WorkerSettings

MakeSettings = Callable[..., WorkerSettings]  # the fixture of conftest.py

local_only = pytest.mark.parametrize("storage_settings", ["local"], indirect=True)


#: The time of the tests that use `clock`.
CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what draws and sends takes time, however busy the machine."""
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


@pytest.fixture
def check(
    storage: Storage, worker_settings: MakeSettings
) -> Callable[..., StartUpCheck]:
    def make(
        blobs: Any = None,
        device: str = "cpu",
        metrics: WorkerMetrics | None = None,
        **limits: float,
    ) -> StartUpCheck:
        return StartUpCheck(
            blobs or storage.blobs,
            worker_settings(device=device),
            NodeLimits(**limits),  # type: ignore[arg-type]
            metrics or WorkerMetrics(),
        )

    return make


@local_only
@pytest.mark.usefixtures("clock")
def test_a_fast_node_generates_once_and_starts_to_work(
    check: Callable[..., StartUpCheck],
) -> None:
    batches = Batches(0.0)
    found = check(images_per_second=5)
    found.load(batches.load)

    assert batches.count == 1
    assert found.findings["images_per_second"] > 5


@local_only
@pytest.mark.usefixtures("clock")
def test_a_slow_first_batch_does_not_count_against_a_node(
    check: Callable[..., StartUpCheck],
) -> None:
    batches = Batches(0.3, 0.3, 0.3, 0.0)
    check(images_per_second=10).load(batches.load)

    assert batches.count == 4


@local_only
@pytest.mark.usefixtures("clock")
def test_a_node_is_not_given_up_since_it_is_not_compiled_yet(
    check: Callable[..., StartUpCheck],
) -> None:
    batches = Batches(0.15)
    engine: Any = batches.load()
    engine.is_compiling = True
    check(images_per_second=10).load(lambda: engine)

    assert batches.count == 1
    with pytest.raises(errors.NodeError, match=r"images/s, less than 10"):
        check(images_per_second=20).load(lambda: engine)


@local_only
@pytest.mark.usefixtures("clock")
def test_a_node_that_is_slow_three_times_after_its_first_batch_is_broken(
    check: Callable[..., StartUpCheck],
) -> None:
    batches = Batches(0.15)
    with pytest.raises(errors.NodeError, match=r"images/s, less than 10"):
        check(images_per_second=10).load(batches.load)

    assert batches.count == 1 + 3


@local_only
@pytest.mark.usefixtures("clock")
def test_without_a_limit_nothing_is_generated_or_sent(
    check: Callable[..., StartUpCheck],
) -> None:
    batches = Batches(0.0)
    found = check()
    found.load(batches.load)
    asyncio.run(found.upload())

    assert batches.count == 0
    assert "upload_bytes_per_second" not in found.findings


async def test_the_checks_blobs_are_really_sent_and_removed(
    storage: Storage, check: Callable[..., StartUpCheck]
) -> None:
    found = check(upload_bits_per_second=1e6)
    await found.upload()

    assert found.findings["upload_bytes_per_second"] > 1e6 / 8
    assert [name async for name in storage.blobs.names()] == []


class Line:
    """Blobs behind a line with the given delays, or the given error."""

    def __init__(self, *seconds: float, error: errors.FleetError | None = None) -> None:
        self.seconds = list(seconds)
        self.blobs = 0
        self.error = error

    @property
    def sent(self) -> int:
        """The check's tries."""
        return math.ceil(self.blobs / start_up.UPLOAD_BLOBS)

    async def create(
        self, name: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> bool:
        self.blobs += 1
        if self.error:
            raise self.error
        seconds = self.seconds[min(self.sent, len(self.seconds)) - 1]
        if math.isinf(seconds):
            await asyncio.Event().wait()
        CLOCK.now += seconds / start_up.UPLOAD_BLOBS
        return True

    async def delete(self, name: str) -> bool:
        return False  # what a least-privilege token may do


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "UPLOAD_PAUSE_SECONDS", 0.01)


@local_only
@pytest.mark.usefixtures("clock")
async def test_a_line_that_is_slow_three_times_is_a_broken_node(
    check: Callable[..., StartUpCheck], at_once: None
) -> None:
    line = Line(0.2)
    limit = 8 * start_up.UPLOAD_BYTES / 0.1
    with pytest.raises(errors.NodeError, match="Mbit/s, less than"):
        await check(line, upload_bits_per_second=limit).upload()

    assert line.sent == 3


@local_only
@pytest.mark.usefixtures("clock")
async def test_a_line_that_is_slow_once_is_not(
    check: Callable[..., StartUpCheck], at_once: None
) -> None:
    line = Line(0.2, 0.01)
    await check(line, upload_bits_per_second=8 * start_up.UPLOAD_BYTES / 0.1).upload()

    assert line.sent == 2


@local_only
async def test_a_line_that_never_ends_is_given_up(
    check: Callable[..., StartUpCheck], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up, "UPLOAD_SLACK_SECONDS", 0.05)
    with pytest.raises(errors.NodeError, match="Mbit/s, less than"):
        await check(
            Line(math.inf), upload_bits_per_second=8 * start_up.UPLOAD_BYTES / 0.05
        ).upload()


@local_only
@pytest.mark.parametrize("kind", [errors.TransientError, errors.SetupError])
async def test_storage_that_is_down_is_not_the_nodes_fault(
    kind: type[errors.FleetError], check: Callable[..., StartUpCheck]
) -> None:
    with pytest.raises(kind):
        await check(Line(0, error=kind()), upload_bits_per_second=1.0).upload()


@local_only
async def test_a_start_up_that_takes_too_long_is_a_broken_node(
    check: Callable[..., StartUpCheck], caplog: pytest.LogCaptureFixture
) -> None:
    found = check(start_up_seconds=0.05)
    with pytest.raises(errors.NodeError, match="--start-up-seconds"):
        async with found.limited():
            await asyncio.Event().wait()

    assert found.findings["passed"] is False
    assert "the node check failed" in caplog.text


@local_only
@pytest.mark.usefixtures("clock")
async def test_the_findings_are_one_log_line_and_the_metrics(
    check: Callable[..., StartUpCheck], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = check(images_per_second=1)
    assert list(found.collect()) == []
    async with found.limited():
        found.load(Batches(0.0).load)

    (line,) = [
        record
        for record in caplog.records
        if vars(record).get("action") == "node_check"
    ]
    facts = vars(line)
    assert facts["passed"] is True
    assert facts["images_per_second"] > 1
    assert facts["free_disk_bytes"] > 0
    assert facts["limits"]["images_per_second"] == 1
    samples = {family.name: family.samples[0].value for family in found.collect()}
    assert samples["imagefleet_node_check_passed"] == 1
    assert (
        samples["imagefleet_node_check_images_per_second"] == facts["images_per_second"]
    )
    assert "imagefleet_node_check_free_gpu_bytes" not in samples


@local_only
@pytest.mark.usefixtures("clock")
def test_a_full_disk_is_a_broken_node(check: Callable[..., StartUpCheck]) -> None:
    with pytest.raises(errors.NodeError, match="disk"):
        check(free_disk_bytes=2**60).load(Batches(0.0).load)


def faults(metrics: WorkerMetrics) -> dict[str, float]:
    """The node's faults that were counted."""
    counted = {
        each: metrics.registry.get_sample_value(
            "imagefleet_node_faults_total", {"fault": each}
        )
        for each in get_args(NodeFault)
    }
    return {fault: count for fault, count in counted.items() if count}


@local_only
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        ({"free_disk_bytes": 2**60}, "disk"),
        ({"images_per_second": 1e9}, "gpu_speed"),
        ({"start_up_seconds": 0.01}, "start_up_time"),
    ],
)
async def test_the_metrics_say_which_check_failed(
    check: Callable[..., StartUpCheck], limits: dict[str, float], fault: str
) -> None:
    metrics = WorkerMetrics()
    node = check(metrics=metrics, **limits)

    async def start_up() -> None:
        async with node.limited():
            node.load(Batches(0.0).load)
            await asyncio.Event().wait()

    with pytest.raises(errors.NodeError):
        await start_up()

    assert faults(metrics) == {fault: 1}
    assert node.findings["passed"] is False


@local_only
async def test_a_node_whose_engine_does_not_load_has_a_fault_of_its_engine(
    check: Callable[..., StartUpCheck],
) -> None:
    metrics = WorkerMetrics()

    async def start_up() -> None:
        async with check(metrics=metrics).limited():
            raise errors.NodeError("the GPU miscalculates")

    with pytest.raises(errors.NodeError):
        await start_up()

    assert faults(metrics) == {"engine": 1}


@local_only
@pytest.mark.usefixtures("clock")
def test_a_rented_gpu_that_torch_cannot_use_is_a_broken_node_and_not_a_cpu(
    check: Callable[..., StartUpCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    batches = Batches(0.0)
    for device in ("auto", "cuda:7"):  # without a limit, loading the engine reports it
        check(device=device).load(batches.load)
    with pytest.raises(errors.NodeError, match="no CUDA GPU"):
        check(device="auto", free_gpu_bytes=1).load(batches.load)


def settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(model=Path("m"), **changes)


def test_off_saladcloud_there_are_no_limits_but_those_that_are_set() -> None:
    assert limits_of(settings(), "RTX 4090 24GB", on_salad=False) == NodeLimits()
    given = settings(min_images_per_second=2, start_up_seconds=4)
    assert limits_of(given, "none", on_salad=False) == NodeLimits(2, 0, 4)


def test_on_saladcloud_a_node_is_held_to_an_eighth_of_its_classs_record() -> None:
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

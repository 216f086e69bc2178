import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.stand_in import StandInEngine
from imagefleet import errors
from imagefleet.job.passes.fields import Pass
from imagefleet.storage.open import Storage
from worker.metrics import WorkerMetrics
from worker.node import watchdog
from worker.node.watchdog import NodeLimits, NodeWatchdog
from worker.pipeline import Machine, Pipeline
from worker.settings import WorkerSettings

MakeSettings = Callable[..., WorkerSettings]  # the fixture of conftest.py

LIMITS = NodeLimits(images_per_second=1.0)


class Clock:
    """A node's time and its engine's, set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_seconds = 0.0
        self.idle_seconds: dict[str, float] = {}

    def monotonic(self) -> float:
        return self.now


@dataclass
class FakeEngineThread:
    clock: Clock


class Node:
    """A watched node; each window is 300 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(watchdog, "time", self.clock)
        self.metrics = WorkerMetrics()
        self.watch = NodeWatchdog(FakeEngineThread(self.clock), LIMITS, self.metrics)  # type: ignore[arg-type]

    def window(
        self,
        images: int = 0,
        busy_seconds: float = 0.0,
        blocked: float = 0.0,
    ) -> str | None:
        for _ in range(images):
            self.watch.image_generated("sd1", [Pass(512, 512, 15)])
        self.clock.busy_seconds += busy_seconds
        self.clock.idle_seconds["backpressure"] = (
            self.clock.idle_seconds.get("backpressure", 0.0) + blocked
        )
        self.clock.now += 300
        return self.watch._close_window()


@pytest.fixture
def node(monkeypatch) -> Node:
    return Node(monkeypatch)


def test_three_slow_windows_in_a_row_are_a_broken_node(node: Node):
    reasons = [node.window(images=100, busy_seconds=290) for _ in range(3)]

    reason = (
        "the node makes 0.345 images/s, less than 1: its GPU drew for 290 s and waited for uploads"
        " for 0 s"
    )
    assert reasons == [reason] * 3
    assert node.watch.failed_in_a_row == 3
    sample = node.metrics.registry.get_sample_value
    assert sample("imagefleet_node_faults_total", {"fault": "speed"}) == 3


def test_one_slow_image_is_not(node: Node):
    assert node.window(images=400, busy_seconds=290) is None
    assert node.window(images=1, busy_seconds=290) is not None
    assert node.window(images=400, busy_seconds=290) is None
    assert node.watch.failed_in_a_row == 0


def test_a_window_in_which_images_were_only_enlarged_says_nothing_of_the_speed(
    node: Node,
):
    assert node.window(images=100, busy_seconds=290) is not None
    node.watch.image_generated(
        "sd1", [Pass(2048, 2048, 0, decodes=False, enlarged=512 * 512)]
    )
    assert node.window(images=100, busy_seconds=290) is None
    assert node.watch.failed_in_a_row == 1
    enlarged_between = [
        Pass(512, 512, 15),
        Pass(1024, 1024, 15, encodes=True, enlarged=512 * 512),
    ]
    node.watch.image_generated("sd1", enlarged_between)
    assert node.window(busy_seconds=290) is not None


def test_idle_time_counts_neither_against_a_node_nor_for_it(node: Node):
    node.window(images=100, busy_seconds=290)
    assert (
        node.window(images=80, busy_seconds=70) is None
    )  # the queue was empty for long
    assert node.watch.failed_in_a_row == 0
    node.window(images=100, busy_seconds=290)
    assert node.window() is None
    assert node.watch.failed_in_a_row == 1
    sample = node.metrics.registry.get_sample_value
    results = {
        result: sample("imagefleet_node_watch_windows_total", {"result": result})
        for result in ("passed", "failed", "unknown")
    }
    assert results == {"passed": 1, "failed": 2, "unknown": 1}


def test_a_window_in_which_no_time_passed_shows_nothing(node: Node):
    assert node.watch._close_window() is None
    assert node.watch.failed_in_a_row == 0


def test_an_upload_so_slow_that_the_gpu_waits_is_a_broken_node(node: Node):
    reason = node.window(images=100, busy_seconds=40, blocked=250)

    assert reason is not None
    assert "drew for 40 s and waited for uploads for 250 s" in reason


def test_a_slow_upload_that_the_gpu_hardly_waits_for_is_not(node: Node):
    assert node.window(images=400, busy_seconds=270, blocked=20) is None


def test_storage_that_is_down_is_not_the_nodes_fault(node: Node):
    node.watch.upload_failed()
    assert node.window(images=100, busy_seconds=40, blocked=250) is None
    node.watch.upload_failed()
    assert node.window(images=100, busy_seconds=90, blocked=200) is None


async def test_a_node_that_fails_three_times_is_given_up_and_hands_its_jobs_back(
    storage: Storage, worker_settings: MakeSettings, monkeypatch
):
    monkeypatch.setattr(watchdog, "WINDOW_SECONDS", 0.15)
    await storage.queue.send(
        json.dumps({"prompt": "x", "id": f"j{n}"}) for n in range(200)
    )
    # Each image is a thousandth of a standard one; the start-up check passes it.
    engine = StandInEngine(tick_seconds=0.02)
    pipeline = Pipeline(
        storage,
        lambda: engine,
        worker_settings(until_empty=False, lease_seconds=300, prefetch_seconds=0),
        machine=Machine(limits=LIMITS),
    )
    with pytest.raises(errors.NodeError, match="images/s, less than 1"):
        await pipeline.run(asyncio.Event(), asyncio.Event())

    completed = pipeline.metrics.outcomes["completed"]
    assert not pipeline.ready
    depth = await storage.queue.depth()
    assert depth.messages == 200 - completed
    assert not depth.leased, "a job was not handed back"

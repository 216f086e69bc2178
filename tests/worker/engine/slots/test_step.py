"""How far the host is ahead of the GPU."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from worker.engine.slots import step


class Event:
    """Stands for CUDA's, which need a GPU: notes what happened, in order."""

    log: list[str]

    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self.name = str(sum(each.startswith("record") for each in self.log))

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.name}")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    Event.log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event.log


@pytest.fixture
def feeder() -> step.InputFeeder:
    state = SimpleNamespace(rows=torch.zeros(1, 2), noise=torch.zeros(1, 4, 2, 2))
    made = step.InputFeeder(state, deque())
    made._pinned = True
    return made


def draw(feeder: step.InputFeeder, log: list[str], *, has_room: bool) -> None:
    feeder.send(next(feeder.inputs)[0], None)
    log.append("tick")
    if not has_room:
        feeder.wait_for_tick()


def test_a_tick_is_handed_over_while_the_gpu_is_at_the_one_before(
    log: list[str], feeder: step.InputFeeder
):
    for _ in range(3):
        draw(feeder, log, has_room=True)
    assert log == [
        *("record 0", "tick"),
        *("wait for 0", "record 1", "tick"),
        *("wait for 1", "record 2", "tick"),
    ]


def test_a_tick_for_which_the_driver_has_no_room_is_handed_over_after_the_one_before(
    log: list[str], feeder: step.InputFeeder
):
    """Else the driver spins, and all other threads' work for the GPU waits."""
    for _ in range(2):
        draw(feeder, log, has_room=False)
    assert log == [
        *("record 0", "tick", "record 1"),
        *("wait for 1", "record 2", "tick", "record 3"),
    ]
    draw(feeder, log, has_room=True)
    assert log[-3:] == ["wait for 3", "record 4", "tick"]

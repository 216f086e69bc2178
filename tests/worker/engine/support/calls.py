"""Notes the calls of an engine's network, and makes some of them fail."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from worker.engine.slots import step
from worker.engine.slots.queue import BatchKey, SlotJob

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")


class Call(NamedTuple):
    """One call: how it takes weights, of how many slots with how many rows, and their jobs."""

    mode: str
    slots: int
    slot_rows: int
    key: BatchKey
    is_compiled: bool
    jobs: list[SlotJob]

    @property
    def seeds(self) -> list[int]:
        return [job.prepared.request.seed for job in self.jobs]


def watch_calls(
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    fails: Callable[[Call], bool] = lambda call: False,
    error: Exception = OUT_OF_MEMORY,
) -> list[Call]:
    """The calls from now on, those that fail with the *error* included."""
    calls: list[Call] = []
    run = engine._runner.run

    def note(used: step.Step, mode: Any, slots: int) -> None:
        (lane,) = (each for each in engine._lanes if each.step is used)
        rows, jobs = used.state.slot_rows, list(lane.active.values())
        compiled = mode in used.compiled
        calls.append(Call(mode, slots, rows, lane.batch_key, compiled, jobs))
        if fails(calls[-1]):
            raise error
        run(used, mode, slots)

    monkeypatch.setattr(engine._runner, "run", note)
    return calls

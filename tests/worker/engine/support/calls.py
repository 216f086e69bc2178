"""Notes the calls of an engine's network, and makes some of them fail."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from worker.engine.slots import step
from worker.engine.slots.queue import BatchKey

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")


class Call(NamedTuple):
    """One call: how it takes weights, of how many slots with how many rows, and of which jobs.

    What it tells of them keeps nothing alive: networks that no job needs are dropped.
    """

    mode: str
    slots: int
    slot_rows: int
    key: BatchKey
    is_compiled: bool
    tickets: list[int]
    seeds: list[int]
    changes_convolutions: set[bool]


def watch_calls(
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    fails: Callable[[Call], bool] = lambda call: False,
    error: Exception = OUT_OF_MEMORY,
) -> list[Call]:
    """The calls from now on, those that fail with the *error* included."""
    calls = []
    run = engine._runner.run

    def note(used: step.Step, mode: Any, slots: int) -> None:
        (lane,) = (each for each in engine._lanes if each.step is used)
        jobs = lane.active.values()
        call = Call(
            mode,
            slots,
            used.state.slot_rows,
            lane.batch_key,
            is_compiled=mode in used.compiled,
            tickets=[job.ticket for job in jobs],
            seeds=[job.prepared.request.seed for job in jobs],
            changes_convolutions={job.changes_convolutions for job in jobs},
        )
        calls.append(call)
        if fails(call):
            raise error
        run(used, mode, slots)

    monkeypatch.setattr(engine._runner, "run", note)
    return calls

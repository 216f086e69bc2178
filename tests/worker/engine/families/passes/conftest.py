from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from worker.engine import load
from worker.engine.checkpoint import Checkpoint
from worker.engine.slots import engine as slots


@pytest.fixture
def make_engine(make_slot_engine) -> Callable[..., slots.SlotEngine]:
    """An engine on a checkpoint that is read once, which other checkpoints may go on for."""

    def read(path: Path, like: Checkpoint) -> Checkpoint:
        return load._read_like(load.EngineSettings(path), like, takes_refiner=True)

    return partial(make_slot_engine, slots=2, read=read)

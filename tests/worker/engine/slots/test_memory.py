from __future__ import annotations

import pytest
import torch

from worker.engine.slots import memory

GIB = 2**30


def find(monkeypatch: pytest.MonkeyPatch, free: float) -> memory.Room:
    """The room beside SD1.5 with so many GiB free, by roughly what it takes."""
    peaks = {"tick": 0.25 * GIB, "decode": 0.8 * GIB}
    monkeypatch.setattr(memory, "_peak_bytes", lambda _, work: peaks[work()])
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(free * GIB))
    return memory.find_room(
        torch.device("cpu"),
        int(0.48 * GIB),
        lambda: "tick",  # type: ignore[arg-type,return-value]
        lambda: "decode",  # type: ignore[arg-type,return-value]
    )


@pytest.mark.parametrize(
    ("free", "slots", "decoded"), [(135, 16, 4), (21, 16, 3), (13, 13, 2), (5.2, 5, 1), (0.5, 1, 1)]
)
def test_slots_are_as_many_as_the_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch, free: float, slots: int, decoded: int
) -> None:
    room = find(monkeypatch, free)
    assert (room.slots, room.decoded) == (slots, decoded)
    used = room.slots * 0.73 + room.decoded * 0.8
    assert used <= free or room.slots == 1

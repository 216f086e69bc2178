from __future__ import annotations

import pytest
import torch

from worker.engine.slots import memory

GIB = 2**30


def find(monkeypatch: pytest.MonkeyPatch, free: float) -> tuple[int, int]:
    """Slots and decoded images that fit *free* GiB beside SD1.5."""
    peaks = {"tick": 0.25 * GIB, "decode": 0.8 * GIB}
    monkeypatch.setattr(memory, "_peak_bytes", lambda _, work: peaks[work()])
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(free * GIB))
    return memory.fit(
        torch.device("cpu"),
        int(0.48 * GIB),
        lambda: "tick",  # type: ignore[arg-type,return-value]
        lambda: "decode",  # type: ignore[arg-type,return-value]
    )


@pytest.mark.parametrize(
    ("free", "slots", "decoded"), [(135, 16, 4), (21, 16, 3), (13, 13, 2), (5.2, 5, 1), (0.5, 1, 1)]
)
def test_the_slots_fit_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: float, slots: int, decoded: int
) -> None:
    assert find(monkeypatch, free) == (slots, decoded)
    used = slots * 0.73 + decoded * 0.8
    assert used <= free or slots == 1

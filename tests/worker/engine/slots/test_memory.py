from __future__ import annotations

import pytest
import torch

from worker.engine.slots import memory

GIB = 2**30


def find(monkeypatch: pytest.MonkeyPatch, free: float, slots: int | None = None) -> memory.Fit:
    """What fits *free* GiB beside SD1.5."""
    peaks = {"tick": 0.25 * GIB, "decode": 0.8 * GIB}
    monkeypatch.setattr(memory, "_peak_bytes", lambda _, work: peaks[work()])
    monkeypatch.setattr(memory, "free_bytes", lambda _: int(free * GIB))
    return memory.fit(
        torch.device("cpu"),
        int(0.48 * GIB),
        lambda: "tick",  # type: ignore[arg-type,return-value]
        lambda: "decode",  # type: ignore[arg-type,return-value]
        slots,
    )


@pytest.mark.parametrize(
    ("free", "slots", "decoded", "blocks"),
    [
        (135, 16, 4, 12),
        (75, 16, 4, 6),
        (21, 16, 3, 1),
        (13, 13, 2, 1),
        (5.2, 5, 1, 1),
        (0.5, 1, 1, 1),
    ],
)
def test_the_slots_fit_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: float, slots: int, decoded: int, blocks: int
) -> None:
    found = find(monkeypatch, free)
    assert found[:3] == (slots, decoded, blocks)
    staged = found.staged_bytes / GIB
    assert 0.47 < staged <= slots * 0.48
    used = slots * 0.73 + decoded * 0.8 + (blocks - 1) * slots * 0.48
    used += staged if blocks > 1 else 0
    used += found.temporary_bytes / GIB
    assert used <= free or slots == 1


def test_given_slots_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, 21, slots=4)[:3] == (4, 3, 6)

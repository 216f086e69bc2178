from __future__ import annotations

import pytest

from imagefleet import concurrency
from loadgen.settings import MOST_BATCHES, MOST_PROCESSES, LoadSettings

AZURE = "UseDevelopmentStorage=true"
MANY = 10_000_000


@pytest.mark.parametrize(
    ("storage", "jobs", "cores", "processes"),
    [
        (AZURE, MANY, 16, 4),
        (AZURE, MANY, 4, 3),
        (AZURE, MANY, 2, 1),
        (AZURE, MANY, 1, 1),
        (AZURE, 1_000, 16, 1),
        (AZURE, None, 16, 1),
        ("local:data", MANY, 16, 1),
    ],
)
def test_processes_are_by_cores_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, storage: str, jobs: int | None, cores: int, processes: int
) -> None:
    monkeypatch.setattr(concurrency, "cores", lambda: cores)
    assert LoadSettings(storage=storage).processes_for(jobs) == processes
    assert LoadSettings(storage=storage, processes=7).processes_for(jobs) == 7


def test_a_sweep_looks_as_far_beyond_its_checkpoint_as_any_load_gets() -> None:
    from fleet.sweep.resume import WINDOW
    from imagefleet.submit import BATCH

    assert MOST_BATCHES * BATCH <= WINDOW
    assert MOST_PROCESSES <= MOST_BATCHES

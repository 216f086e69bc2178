import os
from pathlib import Path

import pytest

from imagefleet import concurrency
from worker.gpus import choice
from worker.gpus.choice import Gpu

CARD = Gpu("0", "GPU-x")


@pytest.fixture(autouse=True)
def quota(monkeypatch, tmp_path) -> Path:
    """The file of a container's limit, on a machine of 16 cores of which 8 are for this process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(concurrency, "_QUOTA", tmp_path / "cpu.max")
    return tmp_path / "cpu.max"


@pytest.mark.parametrize(
    ("limit", "processes", "expected"),
    [
        (None, 2, "4"),
        ("max 100000", 2, "4"),
        ("300000 100000", 1, "3"),
        ("350000 100000", 2, "2"),
        ("50000 100000", 4, "1"),
        ("6400000 100000", 8, "1"),
    ],
)
def test_the_workers_of_a_machine_share_the_cores_that_its_container_may_use(
    quota: Path, limit: str | None, processes: int, expected: str
):
    if limit:
        quota.write_text(limit + "\n")
    assert choice.threads(processes) == expected


def test_where_affinity_is_unknown_all_cores_count(
    monkeypatch,
):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert choice.threads(2) == "8"


def test_each_of_several_gpus_has_its_share_and_a_single_one_all(
    monkeypatch,
):
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-x"}
    assert CARD.environment(1) == visible
    assert CARD.environment(4) == {**visible, "OMP_NUM_THREADS": "2"}
    assert Gpu("0").environment(1) == {"OMP_NUM_THREADS": "8"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert CARD.environment(4)["OMP_NUM_THREADS"] == "5"

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from fleet import load_progress


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(load_progress, "SECONDS_BETWEEN_LINES", 0.0)
    return SimpleNamespace(confirmed=0, refusals=SimpleNamespace(count=0))


def test_a_line_says_the_rate_the_time_left_and_that_the_storage_is_busy(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with load_progress.showing(load, 10_000_000, is_live=False, quiet=False) as show:
        show(1_000)
        load.refusals.count = 12
        show(2_000)
    calm, busy = capsys.readouterr().err.splitlines()
    assert "1,000 of 10,000,000 jobs sent" in calm
    assert "jobs/s" in calm
    assert calm.endswith("left")
    assert "slowed down" not in calm
    assert "slowed down by the storage 12 times" in busy


def test_for_programs_progress_is_a_json_object_a_line(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with load_progress.showing(load, None, is_live=False, quiet=False, as_json=True) as show:
        show(1_000)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["confirmed"], found["total"], found["seconds_left"]) == (1_000, None, None)
    assert found["jobs_per_second"] > 0
    assert found["refusals"] == 0

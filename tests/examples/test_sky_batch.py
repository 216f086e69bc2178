"""The example of Sky Batch, as far as SkyPilot itself judges it without a cloud."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def sky(monkeypatch, tmp_path) -> object:
    """SkyPilot, which no extra installs: it has 60 dependencies."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return pytest.importorskip("sky")


def test_the_pool_is_a_task_that_skypilot_takes(sky: object):
    task = sky.Task.from_yaml(str(EXAMPLES / "sky_batch.yaml"))  # type: ignore[attr-defined]

    assert task.service.pool


def test_the_function_has_nothing_that_a_worker_lacks(sky: object, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))

    import sky_batch  # which SkyPilot's decorator judges

    assert sky_batch.draw._is_remote_function
    sys.modules.pop("sky_batch")

"""The storage of a test of `imagefleet files`, as flags, and its jobs."""

import json
from pathlib import Path

import pytest

import storages
from imagefleet.storage.settings import StorageSettings


@pytest.fixture
def flags(storage_settings: StorageSettings) -> list[str]:
    """A folder, then Azurite."""
    return storages.flags(storage_settings)


@pytest.fixture
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The module's JOBS, a line each."""
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(map(json.dumps, request.module.JOBS)))
    return path

import pytest

from imagefleet.storage.settings import StorageSettings


@pytest.fixture(params=["local", pytest.param("azurite", marks=pytest.mark.slow)])
def storage_settings(request) -> StorageSettings:
    """Of both storages, whose contract has tests of its own."""
    settings = request.getfixturevalue(f"{request.param}_settings")
    assert isinstance(settings, StorageSettings)
    return settings


@pytest.fixture
def soon(monkeypatch) -> None:
    """What a worker otherwise waits for, for some seconds, comes at once."""
    monkeypatch.setattr("worker.stages.record.FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("worker.stages.record.LOCAL_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)

import pytest


@pytest.fixture
def soon(monkeypatch) -> None:
    """What a worker otherwise waits for, for some seconds, comes at once."""
    monkeypatch.setattr("worker.stages.record.FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("worker.stages.record.LOCAL_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("worker.settle.FIRST_RETRY_SECONDS", 0.05)

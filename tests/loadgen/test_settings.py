import pytest

from imagefleet import concurrency
from loadgen.settings import MOST_IN_FLIGHT, MOST_PROCESSES, LoadSettings

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
        ("local:data", MANY, 16, 1),
    ],
)
def test_processes_are_by_cores_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, storage: str, jobs: int, cores: int, processes: int
) -> None:
    monkeypatch.setattr(concurrency, "cores", lambda: cores)
    assert LoadSettings(storage=storage).processes_for(jobs) == processes
    assert LoadSettings(storage=storage, processes=7).processes_for(jobs) == 7


@pytest.mark.parametrize("processes", [1, 3, MOST_PROCESSES])
@pytest.mark.parametrize("jobs", [1, 20, 32, 512])
@pytest.mark.parametrize("storage", [AZURE, "local:data"])
def test_no_more_jobs_are_in_flight_than_was_asked_for(
    storage: str, jobs: int, processes: int
) -> None:
    settings = LoadSettings(storage=storage, concurrency=jobs)
    batches, each = settings.batches_for(processes)
    assert batches >= processes
    assert 1 <= batches * each <= min(processes * jobs, MOST_IN_FLIGHT)

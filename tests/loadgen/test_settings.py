import pytest

from loadgen.settings import LoadSettings


@pytest.mark.parametrize("storage", ["UseDevelopmentStorage=true", "local:data"])
def test_no_more_jobs_are_in_flight_than_was_asked_for(storage: str):
    for jobs in (1, 20, 32, 512):
        batches, each = LoadSettings(storage=storage, concurrency=jobs).batches
        assert 1 <= batches * each <= jobs

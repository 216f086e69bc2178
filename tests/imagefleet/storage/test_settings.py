from __future__ import annotations

import pytest
from pydantic import ValidationError

from imagefleet.storage.settings import StorageSettings


def test_the_poison_queue_lies_beside_the_job_queue() -> None:
    assert StorageSettings(queue="posters").poison_queue == "posters-poison"


@pytest.mark.parametrize("name", ["ab", "Jobs", "jobs_1", "-jobs", "jobs-", "jo--bs", "j" * 57])
def test_a_name_that_azure_would_refuse_is_refused_here(name: str) -> None:
    with pytest.raises(ValidationError):
        StorageSettings(queue=name)


def test_the_longest_name_leaves_room_for_poison() -> None:
    azures_limit = 63

    assert len(StorageSettings(queue="j" * 56).poison_queue) == azures_limit


def test_variables_are_read_and_empty_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEFLEET_QUEUE", "posters")
    monkeypatch.setenv("IMAGEFLEET_CONTAINER", "")

    settings = StorageSettings()

    assert (settings.queue, settings.container) == ("posters", "images")


def test_a_secret_does_not_show_in_a_log() -> None:
    settings = StorageSettings.model_validate({"queue_sas": "sv=1&sig=abc"})

    assert "abc" not in repr(settings)


def test_a_wrong_secret_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ValidationError) as caught:
        StorageSettings.model_validate({"queue": "AccountKey=abc"})

    assert "abc" not in str(caught.value)

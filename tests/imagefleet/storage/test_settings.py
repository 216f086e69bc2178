import pytest
from pydantic import ValidationError

from imagefleet.storage.settings import StorageSettings


def test_the_poison_queue_is_named_after_the_job_queue():
    assert StorageSettings(queue="posters").poison_queue == "posters-poison"


@pytest.mark.parametrize(
    "name", ["ab", "Jobs", "jobs_1", "-jobs", "jobs-", "jo--bs", "j" * 57]
)
def test_a_name_must_follow_azures_rules(name: str):
    with pytest.raises(ValidationError):
        StorageSettings(queue=name)


def test_the_longest_name_leaves_space_for_the_suffix():
    azures_limit = 63

    assert len(StorageSettings(queue="j" * 56).poison_queue) == azures_limit


def test_empty_variables_are_ignored(monkeypatch):
    monkeypatch.setenv("IMAGEFLEET_QUEUE", "posters")
    monkeypatch.setenv("IMAGEFLEET_CONTAINER", "")

    settings = StorageSettings()

    assert (settings.queue, settings.container) == ("posters", "images")


def test_the_repr_hides_secrets():
    settings = StorageSettings.model_validate({"sas": "sv=1&sig=abc"})

    assert "abc" not in repr(settings)


def test_a_validation_error_does_not_quote_the_value():
    with pytest.raises(ValidationError) as caught:
        StorageSettings.model_validate({"queue": "AccountKey=abc"})

    assert "abc" not in str(caught.value)


def test_images_and_files_are_never_in_one_container():
    """Whoever may create images could create LoRAs and a manifest there."""
    with pytest.raises(ValidationError, match="must differ"):
        StorageSettings(container="pictures", files_container="pictures")

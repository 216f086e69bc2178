"""Jobs in flight: what one hands on that ends before all its images are stored, and their order."""

from datetime import UTC, datetime

import pytest

from imagefleet import errors
from imagefleet.job.message import images_of, read_job
from imagefleet.storage.protocol import BlobRecord, LeasedMessage
from worker.jobs.in_flight import InFlightJob
from worker.jobs.stored import stored_record
from worker.leases import Lease


@pytest.fixture
def entry() -> InFlightJob:
    body = '{"prompt": "a house", "id": "j", "seed": 0, "n_iter": 10}'
    message = LeasedMessage("m", body, 1, datetime.now(UTC), "receipt")
    return InFlightJob(Lease(message, 0.0), job=read_job(body, "m"))


NOW = datetime.now(UTC)


def store(entry: InFlightJob, *images: int) -> None:
    assert entry.job is not None
    entry.stored.update(images)
    image = BlobRecord("default/j.png", 9, NOW, {})
    entry.records += [stored_record(entry.job, "m", each, image) for each in images]


def test_the_record_of_the_last_image_says_that_the_job_is_completed(
    entry: InFlightJob,
):
    store(entry, 9, *range(9))
    entry.mark_completed()
    assert [each.index for each in entry.records if each.completes] == [9]


def test_a_job_goes_on_after_a_few_failures_and_not_after_many(
    entry: InFlightJob,
):
    for index in range(2):
        entry.image_failed(index, errors.TransientError())
        assert not entry.is_stopping
    entry.image_failed(2, errors.TransientError())
    assert entry.is_stopping


def test_what_cannot_succeed_stops_a_job_at_once(entry: InFlightJob):
    entry.image_failed(4, error := errors.JobError("it does not fit"))
    assert entry.is_stopping
    assert (
        entry.reason(error)
        == "image 4: it does not fit; of its 10 images are stored: none"
    )
    assert entry.reason(errors.JobError("no such LoRA")).startswith(
        "no such LoRA; of its 10"
    )


@pytest.mark.parametrize(
    ("body", "images"),
    [
        ('{"prompt": "a"}', 1),
        ('{"prompt": "a", "batch_size": 4, "n_iter": 3}', 12),
        ('{"prompt": "a", "n_iter": 3, "verify": true}', 1),
        ("eyJwcm9tcHQiOiAiYSIsICJuX2l0ZXIiOiA1fQ==", 5),
        ('{"n_iter": 10000000, "batch_size": 1000000}', 1000),
        ('{"n_iter": -1}', 1),
        ('{"n_iter": "many"}', 1),
        ("n_iter", 1),
    ],
)
def test_how_many_images_a_message_asks_for(body: str, images: int):
    assert images_of(body) == images

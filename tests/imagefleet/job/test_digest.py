"""A job's digest: the same for the same pictures, whatever else its message says, in any order."""

import json
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from imagefleet.validation import JSONDict

FIELDS: JSONDict = {
    "prompt": "a red house, \U0001f98a\ufffe",
    "negative_prompt": "blur",
    "steps": 12,
    "cfg_scale": 5.5,
    "subseed_strength": 0.25,
    "enable_hr": True,
    "hr_scale": 2,
    "denoising_strength": 0.5,
    "then": [{"prompt": "a blue house"}],
    "id": "a",
}


def read(**changes: Any) -> Job:
    return read_job(json.dumps(FIELDS | changes), "message-1")


def test_the_order_of_fields_names_and_defaults_do_not_change_the_digest():
    backwards = read_job(json.dumps(dict(reversed(FIELDS.items()))), "message-1")
    named = read(campaign="spring", metadata={"sku": 7}, width=None, n_iter=1, seed=-1)

    assert read().digest == backwards.digest == named.digest
    assert read_job(read().to_message(), "another").digest == read().digest


def test_a_scale_of_zero_is_drawn_by_a_job_that_says_which_of_its_meanings_it_has():
    """No guidance in diffusers, the negative prompt alone in AUTOMATIC1111."""
    for scale in (0, 0.0, "0"):
        with pytest.raises(
            errors.InvalidMessageError, match=r"cfg_scale: 0 has two .* give 1 for no"
        ):
            read(cfg_scale=scale)
        assert read(cfg_scale=scale, defaults="a1111-1.10").cfg_scale == 0
    assert read(cfg_scale=0.5).digest != read(cfg_scale=1).digest


@pytest.mark.parametrize(
    "change",
    [{"prompt": "a cat"}, {"steps": 13}, {"seed": 5}, {"id": "b"}, {"then": []}],
)
def test_what_changes_the_pictures_changes_the_digest(change: JSONDict):
    assert read(**change).digest != read().digest


def test_a_copy_has_a_digest_and_fields_of_its_own():
    job = read()
    before = job.digest, job.given_fields

    copy = job.model_copy(update={"prompt": "a cat"})

    assert copy.digest == read(prompt="a cat").digest != before[0]
    assert copy.given_fields["prompt"] == "a cat"
    assert (job.digest, job.given_fields) == before


@pytest.mark.parametrize("stage", [1, 2])
def test_every_field_that_differs_from_its_default_is_in_the_digest(stage: int):
    for job in (Job(**FIELDS), Job(**FIELDS).identified("b", "spring"), read()):
        drawn = job.at_stage(stage)
        assert drawn.given_fields == drawn.model_dump(
            mode="json", exclude_defaults=True
        )

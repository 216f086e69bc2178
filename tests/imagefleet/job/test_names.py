"""No two images of any jobs share a name, and every reader of names finds the job again."""

import string
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from cli import files
from fleet.redo import replace
from imagefleet.job.message import Job
from imagefleet.job.names import REPLACED, duplicate_name
from imagefleet.records.record import Record, of_job
from imagefleet.storage import protocol
from imagefleet.validation import JSONDict

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


class Image(NamedTuple):
    """What tells one image from all others; stage 0: a second drawing."""

    campaign: str
    id: str
    index: int
    stage: int
    format: str


def jobs_of(image: Image) -> Job:
    known: JSONDict = {
        "prompt": "a house",
        "id": image.id,
        "campaign": image.campaign,
    }
    known["output"] = {"format": image.format}
    if image.stage > 1:
        return Job(**known, then=[{"steps": 5}] * 8).at_stage(image.stage)
    return Job(**known, batch_size=max(1, image.index + 1), verify=image.stage == 0)


#: Few letters, lest two names never come close, and what names are made of beside ids.
_LETTERS = st.text(st.sampled_from("aA01~s-._png"), max_size=6)
ids = st.builds(
    lambda first, rest: first + rest.replace("~", "-"),
    st.sampled_from("aA01s"),
    _LETTERS,
)
formats = st.sampled_from(["png", "jpeg", "webp"])
images = st.one_of(
    st.builds(Image, ids, ids, st.integers(0, 12), st.just(1), formats),
    st.builds(Image, ids, ids, st.just(0), st.integers(0, 9), formats),
)


def name_of(image: Image) -> str:
    return jobs_of(image).blob_name(image.index)


@settings(max_examples=50)
@given(st.lists(images, min_size=2, max_size=6, unique=True))
def test_images_of_other_jobs_indices_stages_and_formats_have_other_names(
    some: list[Image],
):
    names = [name_of(image) for image in some]
    assert len(set(names)) == len(names), names
    aside = [f"{REPLACED}{name}" for name in names]
    aside += [duplicate_name(name, worker) for name in names for worker in ("w1", "w2")]
    assert len({*names, *aside}) == len(names) + len(aside)
    for name in (*names, *aside):
        protocol.check_blob_name(name)


@settings(max_examples=50)
@given(st.lists(images, min_size=2, max_size=6, unique=True))
def test_files_of_images_have_other_names_where_capitals_do_not_count(
    some: list[Image],
):
    names = [files.without_case(name_of(image)).lower() for image in some]
    assert len(set(names)) == len(names), names


def record_of(job: Job, index: int, **changes: Any) -> Record:
    known: Mapping[str, Any] = {"outcome": "completed", "at": NOON, "index": index}
    return Record.model_validate(
        {
            **of_job(job),
            **known,
            "blob": job.blob_name(index),
            "completes": True,
            **changes,
        }
    )


@settings(max_examples=50)
@given(images, images)
def test_the_console_takes_a_record_for_its_own_jobs_image_alone(
    one: Image, other: Image
):
    job = jobs_of(one)
    if job.verify:
        return
    assert record_of(job, one.index).has_own_name
    if one[:4] != other[:4]:
        assert not record_of(job, one.index, blob=name_of(other)).has_own_name
    assert replace.draws(job, name_of(one))
    assert replace.draws(job, name_of(other)) == any(
        job.blob_name(index) == name_of(other) for index in range(job.images)
    )


@given(st.text(string.printable, max_size=30), st.text(string.printable, max_size=30))
def test_a_worker_keeps_aside_below_the_images_own_name(one: str, other: str):
    for worker in (one, other):
        name = duplicate_name("spring/a~1.png", worker)
        protocol.check_blob_name(name)
        assert name.startswith("-duplicates/spring/a~1.png/")

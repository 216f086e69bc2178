"""Chains: a job whose `then` lists further stages; each begins with the image of the one before.

The message of a later stage is that of the whole job, as it was sent and with its signature, and a
field `stage` beside it. So a worker needs no key to send it, and whoever changes that field changes
which stage is drawn, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet import errors, validation
from imagefleet.job import sizes, txt2img
from imagefleet.job.passes import extras, sources

if TYPE_CHECKING:
    from imagefleet.job.message import Job

#: The field of a message that says which stage of its job it asks for. It is not signed.
STAGE_FIELD = "stage"

#: The list of the stages after the first.
THEN_FIELD = "then"

#: One digit, so that the names of a job's images sort by stage.
MAX_STAGES = 9

#: Separates a job's id from the number of the stage in the names of images. No id contains it, so
#: no other job has an image of that name.
SEPARATOR = "~"

#: The blob that a stage begins with, in a list of one.
INPUT_FIELD = "init_images"

#: A sampler's own: a stage that names another sampler does not take over these.
_OF_SAMPLER = ("scheduler", "eta", "s_churn", "s_tmin", "s_tmax", "s_noise")

#: What a stage that does not say otherwise takes over from the one before. The rest, as
#: `denoising_strength`, `enable_hr` or a mask, is of one stage alone.
INHERITED = (
    *("prompt", "negative_prompt", "enable_prompt_comments", "clip_skip", "model"),
    *("sampler_name", *_OF_SAMPLER, "steps", "cfg_scale", "s_min_uncond"),
    *("width", "height", "seed", "subseed", "subseed_strength", "randn_source"),
    *("eta_noise_seed_delta", "seed_resize_from_w", "seed_resize_from_h", "output", "metadata"),
)

#: Fields of the whole job; a stage is refused that has one.
OF_JOB = frozenset({"id", "campaign", "verify", THEN_FIELD})

#: A stage makes one image of one.
_OF_IMAGES = frozenset({"batch_size", "n_iter"})


class _Place(BaseModel):
    """The field `stage` of a message. It is untrusted: only a job is signed."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    number: int = Field(ge=2, le=MAX_STAGES)
    message: str | None = Field(default=None, max_length=200)


@dataclass(frozen=True, slots=True)
class Place:
    """A stage's place in its chain: `number` counts from 1."""

    job: Job
    """The whole job, as its message has it."""
    number: int
    message: str | None = None
    """The id of the message of the first stage, or of the one that was replayed."""
    input_size: tuple[int | None, int | None] = (None, None)
    """Width and height of the image of the stage before, as far as the job tells."""


def fields_of_stage(number: int, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that a stage sets.

    Raises:
        ValueError: one of them is not a stage's, or is not supported.
    """
    for name in (INPUT_FIELD, extras.IMAGE):
        if payload.get(name):
            raise ValueError(
                f"stage {number}: {name} is the image of the stage before: leave it out"
            )
    try:
        # With an image, on which depends what its other fields mean.
        fields = txt2img.fields_of_job({**payload, INPUT_FIELD: ["image.png"]})
    except ValueError as error:
        raise ValueError(f"stage {number}: {error}") from None
    del fields[INPUT_FIELD]
    for name in fields:
        if name in OF_JOB:
            raise ValueError(f"stage {number}: {name} is the job's: give it outside {THEN_FIELD}")
        if name in _OF_IMAGES and fields[name] != 1:
            raise ValueError(f"stage {number}: {name} should be 1: a stage makes one image of one")
    return fields


def left(job: Job) -> Iterator[Job]:
    """This stage of a job and those after it."""
    whole = job.place.job if job.place else job
    yield job
    for number in range(job.stage + 1, job.stages + 1):
        yield stage(whole, number)


def last(job: Job) -> Job:
    """The last stage of a job, whose image is its result."""
    return [*left(job)][-1]


def check(job: Job) -> None:
    """Checks the stages of a job.

    Raises:
        ValueError: one is not valid, or the job can have none; says why.
    """
    if job.images > 1:
        raise ValueError(
            f"{THEN_FIELD}: the job asks for {job.images} images, and a chain makes one: send a job"
            " for each"
        )
    if job.verify:
        raise ValueError(f"{THEN_FIELD}: a second drawing (verify) is of a job's first stage alone")
    stage(job, len(job.then) + 1)


def stage(job: Job, number: int, message: str | None = None) -> Job:
    """The job that draws stage *number* of a job, from 1.

    Raises:
        ValueError: the stage, or one before, is not valid.
    """
    known, input_size = job, job.final_size
    for place, given in enumerate(job.then[: number - 1], start=2):
        inherited = {name: value for name, value in _inherited(known).items() if name not in given}
        if "sampler_name" in given or "scheduler" in given:
            inherited = {
                name: value for name, value in inherited.items() if name not in _OF_SAMPLER
            }
        of_job = {name: getattr(job, name) for name in ("id", "campaign")}
        fields = inherited | dict(given) | of_job
        fields[INPUT_FIELD] = [f"{sources.IMAGES}{known.blob_name(0)}"]
        try:
            known = type(job).model_validate(fields)
        except ValidationError as error:
            reason = validation.sentence(error, type(job).model_fields)
            raise ValueError(f"stage {place}: {reason}") from None
        known = known.placed(Place(job, place, message, input_size))
        try:
            input_size = known.final_size
        except errors.JobError as error:  # of a size that only the stage before tells
            raise ValueError(f"stage {place}: {error.message}") from None
    return known


def _inherited(before: Job) -> dict[str, Any]:
    return before.model_dump(mode="json", include=set(INHERITED), exclude_defaults=True)


def stage_of_message(job: Job, field: object) -> Job:
    """The stage of a *job* that its message asks for in its *field* `stage`.

    Raises:
        InvalidMessageError: it is none of its stages.
    """
    try:
        place = _Place.model_validate(field)
    except ValidationError as error:
        reason = validation.sentence(error)
        raise errors.InvalidMessageError(f"{STAGE_FIELD}: {reason}") from None
    if place.number > len(job.then) + 1:
        raise errors.InvalidMessageError(
            f"{STAGE_FIELD}: the job has no stage {place.number} to be drawn"
        )
    return stage(job, place.number, place.message)


def check_size(text: str) -> None:
    """Raises InvalidMessageError for a job that leaves no room for the messages of later stages.

    *text* is its message as they have it, which may be longer than it was sent: in base64, say, no
    character counts as several.
    """
    most = sizes.MAX_MESSAGE_BYTES - sizes.STAGE_BYTES
    if sizes.message_bytes(text) > most:
        raise errors.InvalidMessageError(f"the job with its stages takes more than {most:,} bytes")


def own_fields(fields: dict[str, Any], place: object) -> dict[str, Any]:
    """The fields of the stage that a message asks for: the job's, or one of its list's.

    Raises:
        InvalidMessageError: it has no such stage.
    """
    if place is None:
        return fields
    try:
        number = _Place.model_validate(place).number
        own = fields[THEN_FIELD][number - 2]
    except (ValidationError, LookupError, TypeError):
        own = None
    if not isinstance(own, dict):
        raise errors.InvalidMessageError(f"{STAGE_FIELD}: the job has no such stage")
    return own


def field_of(place: Place) -> dict[str, Any]:
    """The field `stage` of a message that asks for it again, as if nobody had before."""
    return {"number": place.number}


def next_field(job: Job, message_id: str) -> dict[str, Any]:
    """The field `stage` of the message for the stage after *job*, which message had."""
    message = (job.place and job.place.message) or message_id
    return {"number": job.stage + 1, "message": message}


def source(job: Job | None, message_id: str) -> str:
    """Names the sending that a record is of: of a later stage, the message of the first one.

    A worker that dies may send a stage twice; that both messages fail, or that two stages are
    cancelled, is one end of one job.
    """
    message = job.place.message if job is not None and job.place else None
    return message or message_id


def model_of(fields: Mapping[str, Any]) -> object:
    """The model of the stage that a message asks for, as it is written there."""
    place = fields.get(STAGE_FIELD)
    number = place.get("number") if isinstance(place, dict) else 1
    models = models_of(fields)
    return models[min(number, len(models)) - 1] if isinstance(number, int) and number > 0 else None


def models_of(fields: Mapping[str, Any]) -> list[object]:
    """The models of all stages of a message's job, as they are written there."""
    models: list[object] = [fields.get("model")]
    stages = fields.get(THEN_FIELD)
    for each in stages[: MAX_STAGES - 1] if isinstance(stages, list) else ():
        models.append(each.get("model", models[-1]) if isinstance(each, dict) else None)
    return models

"""Chains: a job whose `then` lists further stages; each begins with the image of the one before.

The message of a later stage is the whole job's, with its signature, and a field `stage`: it needs
no key to be sent, and whoever changes that field changes which stage is drawn alone.
"""

from pydantic import Field

from imagefleet.job.passes import extras
from imagefleet.job.passes import fields as passes
from imagefleet.job.passes.first import FirstPass
from imagefleet.validation import JSONDict, JSONObject, Strict

#: A message's fields: the stage that it asks for, which is not signed; and the later stages.
STAGE_FIELD = "stage"
THEN_FIELD = "then"

#: One digit, so that the names of a job's images sort by stage.
MAX_STAGES = 9

#: Separates a job's id, which never contains it, from an image's number or stage in names.
SEPARATOR = "~"

#: The blob that a stage begins with, in a list of one.
INPUT_FIELD = "init_images"

#: A sampler's own: a stage that names another sampler does not take over these.
_OF_SAMPLER = ("scheduler", "eta", "s_churn", "s_tmin", "s_tmax", "s_noise")

#: Fields that a stage takes over from the one before, unless it says otherwise: no mask, say.
INHERITED = frozenset(FirstPass.model_fields) - {"batch_size", "n_iter"} | {
    "model",
    "output",
    "metadata",
    "sd_vae",
    "tiling",
    "defaults",
}

#: Fields of the whole job; a stage is refused that has one.
OF_JOB = {"id", "campaign", "verify", "awaited", "keep", "defaults", THEN_FIELD}


class StageField(Strict, hide_input_in_errors=True):
    """The field `stage` of a message. It is untrusted: only a job is signed."""

    number: int = Field(ge=2, le=MAX_STAGES)
    message: str | None = Field(default=None, max_length=200)


def fields_of_stage(number: int, payload: JSONObject) -> JSONDict:
    """The fields of a job that a stage sets; raises ValueError for one that a stage has not."""
    for name in (INPUT_FIELD, extras.IMAGE):
        if payload.get(name):
            raise ValueError(
                f"stage {number}: {name} is the image of the stage before: leave it out"
            )
    try:
        # With an image, on which depends what its other fields mean.
        fields = passes.fields_of_job({**payload, INPUT_FIELD: ["image.png"]})
    except ValueError as error:
        raise ValueError(f"stage {number}: {error}") from None
    del fields[INPUT_FIELD]
    for name in fields:
        if name in OF_JOB:
            raise ValueError(
                f"stage {number}: {name} is the job's: give it outside {THEN_FIELD}"
            )
        if name in {"batch_size", "n_iter"} and fields[name] != 1:
            raise ValueError(
                f"stage {number}: {name} should be 1: a stage makes one image of one"
            )
    return fields


def inherited(before: JSONObject, given: JSONObject) -> JSONDict:
    """The fields that a stage, whose own are *given*, takes over from those of the one before."""
    sampler_is_another = "sampler_name" in given or "scheduler" in given
    return {
        name: value
        for name, value in before.items()
        if name in INHERITED
        and name not in given
        and not (sampler_is_another and name in _OF_SAMPLER)
    }


def model_of(fields: JSONObject) -> object:
    """The model of the stage that a message asks for, as it is written there."""
    place = fields.get(STAGE_FIELD)
    number = place.get("number") if isinstance(place, dict) else 1
    models = models_of(fields)
    return (
        models[min(number, len(models)) - 1]
        if isinstance(number, int) and number > 0
        else None
    )


def models_of(fields: JSONObject) -> list[object]:
    """The models of all stages of a message's job, as they are written there."""
    models = [fields.get("model")]
    stages = fields.get(THEN_FIELD)
    for each in stages[: MAX_STAGES - 1] if isinstance(stages, list) else ():
        models.append(each.get("model", models[-1]) if isinstance(each, dict) else None)
    return models

"""The record of one image, or of one job that ended without.

It is untrusted: whoever may store images may write records, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic_core
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from imagefleet import errors, validation
from imagefleet.job.chain import MAX_STAGES
from imagefleet.job.message import DEFAULT_CAMPAIGN, Job, SafeId, job_key
from imagefleet.job.passes.first import MAX_IMAGES_PER_JOB
from imagefleet.job.sizes import MAX_BLOB_NAME, MAX_MESSAGE_BYTES

#: No job waits longer in a worker, and no worker starts for longer.
_LONGEST_SECONDS = 7 * 24 * 3600

#: The most characters in the name of a worker, a GPU, a model or an error.
MAX_NAME_CHARACTERS = 200

_Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARACTERS)]
_Text = Annotated[str, StringConstraints(max_length=MAX_MESSAGE_BYTES)]
#: What columns of tables and plots hold; a clock that was never set is in 1970.
_Number = Annotated[int, Field(ge=0, lt=2**53)]
_Moment = Annotated[
    AwareDatetime,
    Field(ge=datetime(1970, 1, 1, tzinfo=UTC), lt=datetime(3000, 1, 1, tzinfo=UTC)),
]
_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_SECONDS)]

Outcome = Literal["completed", "failed", "cancelled", "replayed", "discarded", "replaced"]
"""`completed` is one stored image, `replaced` one that `imagefleet redo` has put aside.

The others are of a whole job; the last three are by an operator.
"""


#: What the metadata of an image's blob have by the same names.
_OF_BLOB = (
    *("worker", "gpu", "price_per_hour", "start_up_seconds", "seconds"),
    *("images", "stage", "stages", "seed"),
)


class Lora(NamedTuple):
    """A LoRA that a prompt names, and its weight."""

    name: _Name
    weight: float


class Embedding(NamedTuple):
    """A textual inversion embedding that the prompts name, and the SHA-256 of its file."""

    name: _Name
    sha256: _Name


class Record(BaseModel):
    """One line of a shard: an image, or a job that ended otherwise."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    outcome: Outcome
    blob: Annotated[str, StringConstraints(max_length=MAX_BLOB_NAME)] | None = None
    id: SafeId
    """The job's id; that of its message where the job could not be read."""
    campaign: SafeId = DEFAULT_CAMPAIGN
    at: _Moment
    """The time at which the image was stored, or the job ended; by the clock of the worker."""
    source: _Name | None = None
    """The id of the message that carried the job."""
    attempts: int = Field(default=1, ge=1, le=1_000_000)
    """Deliveries of the message; of a failed job, how often it was tried."""
    worker: _Name = "?"
    gpu: _Name | None = None
    started_at: _Moment | None = None
    """The time at which the worker started."""
    start_up_seconds: _Seconds = 0
    price_per_hour: float | None = Field(default=None, ge=0, le=1_000)
    """US dollars."""

    size_bytes: _Number | None = None
    index: int = Field(default=0, ge=0, lt=MAX_IMAGES_PER_JOB)
    """The image's position among the job's images, from 0."""
    images: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    completes: bool | None = None
    """Whether a job of several images is complete with this one."""
    seconds: _Seconds | None = None
    """Seconds from the pull of the job to the image's upload."""
    stage: int = Field(default=1, ge=1, le=MAX_STAGES)
    """The stage of a job with `then` that this record is of."""
    stages: int = Field(default=1, ge=1, le=MAX_STAGES)

    prompt: _Text | None = None
    negative_prompt: _Text | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """The image's own."""
    model: _Name | None = None
    sampler: _Name | None = None
    steps: _Number | None = None
    cfg_scale: float | None = None
    clip_skip: _Number | None = None
    width: _Number | None = None
    height: _Number | None = None
    loras: tuple[Lora, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    error: _Name | None = None
    """The class of the error that the job failed with."""
    reason: _Text | None = None
    body: _Text | None = None
    """The message that replays a failed job."""

    @property
    def key(self) -> str:
        """`campaign/id`, which identifies the job within its storage."""
        return job_key(self.campaign, self.id)

    @property
    def completes_job(self) -> bool:
        """Whether this image is the one by which its job is counted as completed."""
        return self.stage == self.stages and (self.images == 1 or bool(self.completes))

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Parses a line of a shard; raises JobError, which says in a sentence why it is none."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise errors.JobError(validation.sentence(error)) from None

    @classmethod
    def of_blob(cls, known: Mapping[str, Any], metadata: Mapping[str, str]) -> Self:
        """The record of an image as the *metadata* of its blob tell it, beside what is *known*.

        They are untrusted: of damaged ones, only what is known.
        """
        try:
            told: dict[str, Any] = {name: metadata[name] for name in _OF_BLOB if name in metadata}
            if "attempt" in metadata:
                told["attempts"] = metadata["attempt"]
            if "metadata" in metadata:
                told["metadata"] = pydantic_core.from_json(metadata["metadata"])
            return cls.model_validate({**told, **known})
        except ValueError:  # JSON that is none, or pydantic's ValidationError
            return cls.model_validate(known)

    def line(self) -> bytes:
        """The record as a line of JSON, without what it lacks."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


def hashed(text: str) -> int:
    """A hash of 64 bits, to remember what was seen in less memory than the text takes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def of_job(job: Job) -> dict[str, object]:
    """The fields of a record that a job's own tell.

    A stage that only enlarges an image has the settings by which its chain has drawn it.
    """
    is_drawn = not job.only_upscales or job.stage > 1
    return {
        "id": job.id,
        "campaign": job.campaign or DEFAULT_CAMPAIGN,
        "images": job.images,
        "stage": job.stage,
        "stages": job.stages,
        "prompt": job.prompt,
        "negative_prompt": job.negative_prompt,
        "sampler": job.sampler if is_drawn else None,
        "steps": job.steps if is_drawn else None,
        "cfg_scale": job.cfg_scale if is_drawn else None,
        "clip_skip": job.clip_skip if is_drawn else None,
        "loras": tuple(Lora(each.name, each.unet_weight) for each in job.parsed_prompt.loras),
        "metadata": job.metadata,
    }

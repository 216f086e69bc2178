"""The job: one JSON message, a picture or a few, in the field names of AUTOMATIC1111's txt2img."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from imagefleet import errors
from imagefleet.job import prompt, samplers, txt2img

#: More images than this in one job would outlive any sensible lease; send more jobs instead.
MAX_IMAGES_PER_JOB = 64

#: Travels as a header beside the image, where Azure allows 8 KiB in all.
MAX_METADATA_BYTES = 4096

SafeId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
SafeFileName = Annotated[str, StringConstraints(pattern=rf"^{prompt.SAFE_NAME.pattern}$")]
Prompt = Annotated[str, StringConstraints(max_length=65_536)]
Side = Annotated[int, Field(ge=64, le=2048, multiple_of=8)]

#: A message may be wrong in thousands of places; a person mends a few at a time.
_REASONS_TOLD = 5

_SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}


class Output(BaseModel):
    """How the picture is stored. Quality counts for JPEG and WebP; PNG is lossless."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["png", "jpeg", "webp"] = "png"
    quality: int = Field(default=90, ge=1, le=100)


class Job(BaseModel):
    """A validated job. Its `id` and `seed` are always known once it was read from a message."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    prompt: Prompt
    negative_prompt: Prompt = ""
    sampler_name: str = "Euler a"
    scheduler: str | None = None
    steps: int = Field(default=20, ge=1, le=150)
    cfg_scale: float = Field(default=7.0, ge=1, le=30)
    width: Side | None = None
    height: Side | None = None
    seed: int = Field(default=-1, ge=-1, le=2**32 - 1)
    batch_size: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    n_iter: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    clip_skip: int = Field(default=1, ge=1, le=12)
    model: SafeFileName | None = None
    id: SafeId | None = None
    campaign: SafeId | None = None
    output: Output = Output()
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read_txt2img(cls, payload: object) -> object:
        if not isinstance(payload, dict):
            return payload
        fields = txt2img.without_neutral_fields(payload)
        legacy_name = fields.pop("sampler_index", None)
        if legacy_name and not fields.get("sampler_name"):
            fields["sampler_name"] = legacy_name
        return fields

    @field_validator("prompt")
    @classmethod
    def _prompt_is_understood(cls, text: str) -> str:
        try:
            prompt.read_prompt(text)
        except errors.JobError as error:
            raise ValueError(error.message) from None
        return text

    @field_validator("negative_prompt")
    @classmethod
    def _negative_prompt_is_understood(cls, text: str) -> str:
        try:
            prompt.read_negative_prompt(text)
        except errors.JobError as error:
            raise ValueError(error.message) from None
        return text

    @field_validator("sampler_name")
    @classmethod
    def _sampler_is_known(cls, name: str) -> str:
        samplers.find(name)
        return name

    @field_validator("scheduler")
    @classmethod
    def _scheduler_is_known(cls, name: str | None) -> str | None:
        samplers.check_scheduler(name)
        return name

    @field_validator("metadata")
    @classmethod
    def _metadata_is_small(cls, metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            size = len(json.dumps(metadata, ensure_ascii=False).encode())
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no text") from None
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"is {size:,} bytes of JSON; {MAX_METADATA_BYTES:,} are allowed")
        return metadata

    @model_validator(mode="after")
    def _images_are_bounded(self) -> Self:
        if self.images > MAX_IMAGES_PER_JOB:
            raise ValueError(
                f"batch_size x n_iter is {self.images}; a job makes {MAX_IMAGES_PER_JOB} images"
                " at most, so send more jobs"
            )
        return self

    @property
    def images(self) -> int:
        return self.batch_size * self.n_iter

    @property
    def sampler(self) -> str:
        """The sampler's one name inside the project."""
        return samplers.find(self.sampler_name, self.scheduler).key

    def image_seed(self, index: int) -> int:
        """AUTOMATIC1111's rule: each image of a job counts the seed up by one."""
        return (self.seed + index) % 2**32

    def blob_name(self, index: int) -> str:
        """Where image *index* goes: it follows from the job alone, so that a retry meets it."""
        number = f"-{index}" if self.images > 1 else ""
        return f"{self.campaign or 'default'}/{self.id}{number}.{_SUFFIXES[self.output.format]}"

    def to_message(self) -> str:
        """One line of JSON with only what differs from the defaults, readable by `read_job`."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        # XML, in which Azure carries messages, has no place for these two.
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        return text.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def read_job(body: str, message_id: str) -> Job:
    """Reads a job from a message: plain JSON, or JSON in base64 as Azure Functions send it.

    A job without an id takes the message's; without a seed, one drawn from its id, so that a
    retry draws the same picture.

    Raises:
        InvalidMessageError: the message is no valid job; says why in one sentence.
    """
    try:
        fields = json.loads(_without_base64(body))
    except (ValueError, RecursionError) as error:
        raise errors.InvalidMessageError(f"the message is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise errors.InvalidMessageError(
            f"the message is JSON but no object: it is a {type(fields).__name__}"
        )
    try:
        job = Job.model_validate(fields)
    except ValidationError as error:
        raise errors.InvalidMessageError(_sentence(error)) from None
    job_id = job.id or message_id
    seed = job.seed if job.seed >= 0 else _seed_from(job_id)
    return job.model_copy(update={"id": job_id, "seed": seed})


def _without_base64(body: str) -> str:
    if body.lstrip()[:1] in {"{", "["}:
        return body
    try:
        return base64.b64decode(body.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return body


def _seed_from(job_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=4).digest())


def _sentence(error: ValidationError) -> str:
    reasons = [_reason(cast("Mapping[str, Any]", detail)) for detail in error.errors()]
    more = len(reasons) - _REASONS_TOLD
    return "; ".join(reasons[:_REASONS_TOLD]) + (f"; and {more:,} more" if more > 0 else "")


def _reason(detail: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])[:80]
    if detail["type"] == "extra_forbidden":
        known = difflib.get_close_matches(where, Job.model_fields, n=1)
        hint = f"; did you mean {known[0]!r}?" if known else ""
        return f"unknown field {where!r}{hint}"
    what = re.sub(r"^(Value error, |Input )", "", str(detail["msg"]))
    return f"{where}: {what}" if where else what

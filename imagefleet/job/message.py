"""The job: one JSON message with the field names of AUTOMATIC1111's payloads."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from imagefleet import errors, signing, validation
from imagefleet.job import chain, noise, samplers, txt2img
from imagefleet.job import prompt as prompts
from imagefleet.job.metadata import Metadata
from imagefleet.job.passes import fields as passes
from imagefleet.job.passes.fields import PassFields
from imagefleet.job.passes.limits import MAX_GUIDANCE, MAX_SIDE, MIN_SIDE, PromptText
from imagefleet.job.prompt import SAFE_NAME, Prompt

if TYPE_CHECKING:
    from imagefleet.signing import SigningKey, TrustedKeys

#: A message's record of its earlier deliveries (`imagefleet.storage.deliveries`), not of the job.
DELIVERIES_FIELD = "deliveries"

#: A message's signature over all its other fields except the record of its deliveries.
SIGNATURE_FIELD = "signature"

#: The field of an exported failed job that says why it failed, which is no part of the job.
FAILURE_FIELD = "failure"

#: What a slow node draws in an hour or so: until then a job's images hold a place in a worker.
MAX_IMAGES_PER_JOB = 1000

#: More than any image of a job has: its pixels, and its file, of which pure noise has 12 MiB.
MAX_IMAGE_PIXELS = MAX_SIDE**2
MAX_IMAGE_BYTES = 32 * 2**20


def _matches(pattern: re.Pattern[str], allowed: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"use 1 to 128 {allowed}")
        return text

    return AfterValidator(check)


SafeId = Annotated[
    str,
    _matches(
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"),
        "letters, digits and . _ - only, beginning with a letter or a digit",
    ),
]
SafeFileName = Annotated[
    str, _matches(SAFE_NAME, "letters, digits, spaces and _ . + ( ) - only, without a path")
]


def _is_off_or_side(pixels: int) -> int:
    if pixels > 0 and not MIN_SIDE <= pixels <= MAX_SIDE:
        raise ValueError(f"should be between {MIN_SIDE} and {MAX_SIDE}, or 0 for no resizing")
    return max(pixels, 0)


Side = Annotated[int, Field(ge=MIN_SIDE, le=MAX_SIDE, multiple_of=8)]

#: The folder of images whose jobs have no campaign.
DEFAULT_CAMPAIGN = "default"

#: Second drawings, each with its image's name below this folder. No campaign begins with a hyphen,
#: so nothing below these folders is taken for a job's image.
CHECKS = "-checks/"

#: Jobs of fewer steps may come out quite different on another GPU, so they are not drawn twice:
#: 5 of 12 did with 4 steps, none of 15.
COMPARABLE_STEPS = 10

#: Drawings that came too late for their names: below the image's name, one for each worker.
DUPLICATES = "-duplicates/"

#: Images that `imagefleet redo` has replaced: below the image's name.
REPLACED = "-replaced/"

#: Shards of records (`imagefleet.records`), below their campaign.
RECORDS = "-records/"

#: Records of the images that a node has stored since its last good check, once one has failed.
SUSPECT = "-suspect/"

#: What workers and the operator store beside images begins so.
ASIDE = "-"

SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}


class Output(BaseModel):
    """How images are stored; `quality` is for JPEG and WebP."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["png", "jpeg", "webp"] = "png"
    quality: int = Field(default=90, ge=1, le=100)


class Job(PassFields):
    """A validated job; one that `read_job` returned has an `id` and a `seed`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    prompt: PromptText
    negative_prompt: PromptText = ""
    sampler_name: str = "Euler a"
    scheduler: str | None = None
    steps: int = Field(default=20, ge=1, le=150)
    cfg_scale: float = Field(default=7.0, ge=1, le=MAX_GUIDANCE)
    width: Side | None = None
    height: Side | None = None
    seed: int = Field(default=-1, ge=-1, le=2**32 - 1)
    batch_size: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    n_iter: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    clip_skip: int = Field(default=1, ge=1, le=12)
    eta: float | None = Field(default=None, ge=0, le=1)
    s_churn: float = Field(default=0.0, ge=0, le=100)
    s_tmin: float = Field(default=0.0, ge=0, le=1000)
    s_tmax: float = Field(default=0.0, ge=0, le=1000)
    """0: no limit."""
    s_noise: float = Field(default=1.0, ge=0, le=10)
    s_min_uncond: float = Field(default=0.0, ge=0, le=1000)
    randn_source: noise.Source = "CPU"
    eta_noise_seed_delta: int = Field(default=0, ge=-(2**32), le=2**32)
    subseed: int = Field(default=-1, ge=-1, le=2**32 - 1)
    subseed_strength: float = Field(default=0.0, ge=0, le=1)
    seed_resize_from_w: Annotated[int, AfterValidator(_is_off_or_side)] = 0
    seed_resize_from_h: Annotated[int, AfterValidator(_is_off_or_side)] = 0
    enable_prompt_comments: bool = True
    model: SafeFileName | None = None
    id: SafeId | None = None
    campaign: SafeId | None = None
    output: Output = Output()
    metadata: Metadata = Field(default_factory=dict)
    verify: bool = False
    """A second drawing of the job's first image, to be compared; it is no result of the job."""
    then: tuple[dict[str, JsonValue], ...] = Field(default=(), max_length=chain.MAX_STAGES - 1)
    """The stages after this one, each with the fields in which it differs from the one before."""

    @model_validator(mode="before")
    @classmethod
    def _read_txt2img(cls, payload: object) -> object:
        if not isinstance(payload, dict):
            return payload
        fields = txt2img.fields_of_job(payload)
        if passes.only_upscales(fields):
            fields.setdefault("prompt", "")
        return fields

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

    @field_validator("then")
    @classmethod
    def _read_stages(cls, stages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        return tuple(chain.fields_of_stage(number, each) for number, each in enumerate(stages, 2))

    @model_validator(mode="after")
    def _images_are_bounded(self) -> Self:
        if self.images > MAX_IMAGES_PER_JOB:
            raise ValueError(
                f"batch_size x n_iter is {self.images}; a job makes {MAX_IMAGES_PER_JOB} images"
                " at most, so send more jobs"
            )
        return self

    @model_validator(mode="after")
    def _steps_draw_an_image(self) -> Self:
        if self.steps < samplers.least_steps(self.sampler):
            raise ValueError(samplers.too_few_steps(self.sampler))
        return self

    @model_validator(mode="after")
    def _seeds_do_not_wrap(self) -> Self:
        if self.randn_source in noise.PHILOX and self.seed + self.images > 2**32:
            raise ValueError(
                f"seed: the seeds of {self.images} images from {self.seed} on go beyond 32 bits,"
                f" which with randn_source {self.randn_source} are no longer those of this job"
            )
        return self

    @model_validator(mode="after")
    def _parse_prompts(self) -> Self:
        for field in ("prompt", "negative_prompt"):
            try:
                getattr(self, f"parsed_{field}")
            except errors.JobError as error:
                raise ValueError(f"{field}: {error.message}") from None
        if abs(self.guidance) > MAX_GUIDANCE:
            raise ValueError(
                f"cfg_scale: {self.cfg_scale:g} times the prompt's own weight, which is"
                f" {self.parsed_prompt.weight:g}, is more than {MAX_GUIDANCE}"
            )
        return self

    @model_validator(mode="after")
    def _stages_are_jobs(self) -> Self:
        if self.then:
            chain.check(self)
        return self

    @functools.cached_property
    def parsed_prompt(self) -> Prompt:
        return prompts.read_prompt(self.prompt, comments=self.enable_prompt_comments)

    @functools.cached_property
    def parsed_negative_prompt(self) -> Prompt:
        return prompts.read_negative_prompt(
            self.negative_prompt, comments=self.enable_prompt_comments
        )

    @property
    def shown_prompts(self) -> tuple[str, str]:
        """The prompt and the negative prompt without comments, as an image's parameters have it."""
        if not self.enable_prompt_comments:
            return self.prompt, self.negative_prompt
        return prompts.without_comments(self.prompt), prompts.without_comments(self.negative_prompt)

    @property
    def guidance(self) -> float:
        """The guidance scale; the prompt's own weight multiplies it, as in AUTOMATIC1111."""
        return self.cfg_scale * self.parsed_prompt.weight

    def identified(self, job_id: str, campaign: str | None = None) -> Self:
        """The job with *job_id*, a seed derived from its id, *campaign*, where it has none."""
        known_id = self.id or job_id
        seed = self.seed if self.seed >= 0 else _seed_from(known_id + self._stage_suffix)
        subseed = self.subseed
        if subseed < 0 and self.subseed_strength:
            subseed = _seed_from(f"{known_id}/subseed")
        campaign = self.campaign or campaign
        return self.model_copy(
            update={"id": known_id, "seed": seed, "subseed": subseed, "campaign": campaign}
        )

    def placed(self, place: chain.Place) -> Self:
        """This as a later stage of a job."""
        job = self.model_copy()
        job.__dict__["place"] = place
        return job if place.job.id is None else job.identified(place.job.id)

    @functools.cached_property  # looked up a dozen times a job, and a private attribute is slow
    def place(self) -> chain.Place | None:
        """A later stage's place in its chain; None for a job as it was sent."""
        return None  # `placed` sets another

    @property
    def stage(self) -> int:
        """The number of this stage, from 1."""
        return self.place.number if self.place else 1

    @property
    def stages(self) -> int:
        """The stages of the whole job, 1 without a chain."""
        return 1 + len(self.place.job.then if self.place else self.then)

    @property
    def _stage_suffix(self) -> str:
        return f"{chain.SEPARATOR}{self.place.number}" if self.place else ""

    @property
    def images(self) -> int:
        return self.batch_size * self.n_iter

    @property
    def sampler(self) -> str:
        """The sampler's key (`imagefleet.job.samplers`)."""
        return samplers.find(self.sampler_name, self.scheduler).key

    @property
    def images_to_draw(self) -> int:
        return 1 if self.verify else self.images

    @property
    def sampler_options(self) -> samplers.Options:
        return samplers.Options(
            self.eta,
            self.s_churn,
            self.s_tmin,
            self.s_tmax or math.inf,
            self.s_noise,
            self.s_min_uncond,
        )

    def image_seed(self, index: int) -> int:
        """Each image of a job increments the seed, or the subseed, as in AUTOMATIC1111."""
        return self.seed if self.subseed_strength else (self.seed + index) % 2**32

    def image_subseed(self, index: int) -> int:
        return self.subseed + index

    @property
    def seed_resize_from(self) -> tuple[int, int] | None:
        """(width, height) of the image that the seed is from, if both are given."""
        size = self.seed_resize_from_w, self.seed_resize_from_h
        return size if min(size) > 0 else None

    def image_noise(self, index: int) -> noise.Noise:
        return noise.Noise(
            self.randn_source,
            self.eta_noise_seed_delta,
            self.image_subseed(index) if self.subseed_strength else 0,
            self.subseed_strength,
            self.seed_resize_from,
        )

    def blob_name(self, index: int) -> str:
        """The name of image *index*: it follows from the job alone, so a retry finds it taken."""
        number = f"-{index}" if self.images > 1 else self._stage_suffix
        folder = CHECKS if self.verify else ""
        suffix = SUFFIXES[self.output.format]
        return f"{folder}{job_key(self.campaign, self.id)}{number}.{suffix}"

    def to_message(self, key: SigningKey | None = None) -> str:
        """One line of JSON without defaults, for `read_job`; signed with *key*.

        Of a later stage, the whole job's with the number of the stage.

        Raises:
            ValueError: a job to be signed has no id.
        """
        job = self.place.job if self.place else self
        fields = job.model_dump(mode="json", exclude_defaults=True)
        if key is not None:
            if job.id is None:
                raise ValueError("a signed job needs an id")
            fields[SIGNATURE_FIELD] = key.sign(signing.OF_JOBS, fields)
        if self.place is not None:
            fields[chain.STAGE_FIELD] = chain.field_of(self.place)
        return message_text(fields)


def read_job(body: str, message_id: str, trusted: TrustedKeys | None = None) -> Job:
    """Reads a job from a message: plain JSON, or JSON in base64 as Azure Functions send it.

    A job without an id takes the message's; one without a seed derives it from its id, so that a
    retry generates the same image.

    Raises:
        InvalidMessageError: the message is not a valid job; says why in one sentence.
        UntrustedJobError: none of the *trusted* keys has signed it.
    """
    try:
        fields = message_fields(body)
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON: {error}" if body.strip() else "is empty"
        raise errors.InvalidMessageError(f"the message {reason}") from None
    if not isinstance(fields, dict):
        raise errors.InvalidMessageError(
            f"the message is a JSON {_JSON_TYPES[type(fields)]}, not an object"
        )
    fields.pop(DELIVERIES_FIELD, None)
    signature = fields.pop(SIGNATURE_FIELD, None)
    stage = fields.pop(chain.STAGE_FIELD, None)
    if trusted is not None:
        signing.check_job(fields, signature, trusted)
    try:
        job = Job.model_validate(fields)
    except ValidationError as error:
        raise errors.InvalidMessageError(validation.sentence(error, Job.model_fields)) from None
    if job.then and stage is None:
        signed = {} if signature is None else {SIGNATURE_FIELD: signature}
        chain.check_size(message_text(fields | signed))
    job = job.identified(message_id)
    return job if stage is None else chain.stage_of_message(job, stage)


_JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    float: "number",
    int: "number",
    list: "array",
    str: "string",
    type(None): "null",
}


def message_fields(body: str) -> Any:
    """The JSON of a message, plain or in base64.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    return json.loads(_without_base64(body))


def message_text(fields: Mapping[str, Any]) -> str:
    """The text of a message, which Azure carries in XML; that excludes two characters."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
    # Half of a surrogate pair, in a field that no job reads, goes on as its sender escaped it.
    return text.encode(errors="backslashreplace").decode()


def text_for_image(body: str, job: Job) -> str:
    """A job's message for its image's file (`imagefleet.job.embedded`), in ASCII.

    As it was received, its signature included, with its id, and without its deliveries.
    """
    fields = message_fields(body)
    fields.pop(DELIVERIES_FIELD, None)
    if not fields.get("id"):  # which no signed job lacks
        fields["id"] = job.id
    if job.place is not None:
        fields[chain.STAGE_FIELD] = chain.field_of(job.place)
    return json.dumps(fields, separators=(",", ":"))


def images_of(body: str) -> int:
    """How many images a message asks for, as far as it can be read; whether it is a job or not."""
    if body.startswith("{") and not ("batch_size" in body or "n_iter" in body):
        return 1  # the most common case, without parsing it
    fields = fields_if_any(body)
    counts = [fields.get("batch_size", 1), fields.get("n_iter", 1)]
    if fields.get("verify") or not all(isinstance(each, int) and each > 0 for each in counts):
        return 1
    return min(int(math.prod(counts)), MAX_IMAGES_PER_JOB)


def is_signed(body: str) -> bool:
    """Whether a message carries a signature, which may be anyone's."""
    if body.startswith("{") and SIGNATURE_FIELD not in body:
        return False  # the most common case, without parsing it
    return SIGNATURE_FIELD in fields_if_any(body)


def fields_if_any(body: str) -> dict[str, Any]:
    """The fields of a message, none if they cannot be read."""
    try:
        fields = message_fields(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def job_key(campaign: str | None, job_id: str | None) -> str:
    """Identifies a job within its storage."""
    return f"{campaign or DEFAULT_CAMPAIGN}/{job_id}"


def split_job_key(name: str, campaign: str | None = None) -> tuple[str, str]:
    """Campaign and id of a job that somebody names by `campaign/id`, or by its id alone."""
    if campaign is None and "/" in name:
        campaign, _, name = name.partition("/")
    return campaign or DEFAULT_CAMPAIGN, name


def _without_base64(body: str) -> str:
    if body.lstrip()[:1] in {"{", "["}:
        return body
    try:
        return base64.b64decode(body.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return body


def _seed_from(job_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=4).digest())

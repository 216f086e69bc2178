"""The job: one JSON message with the field names of AUTOMATIC1111's payloads."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

import pydantic_core
from pydantic import (
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from imagefleet import validation
from imagefleet.errors import InvalidMessageError
from imagefleet.job import chain, settings_table, sizes
from imagefleet.job.passes import fields as passes
from imagefleet.job.passes import img2img
from imagefleet.job.passes.fields import PassFields
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.job.sizes import MAX_IMAGES_PER_JOB, MAX_SIDE, Metadata, PartialSize
from imagefleet.keeping.rule import MAX_JUDGED, Keep
from imagefleet.signing import SIGNATURE_FIELD, JobSigner, TrustedJobs
from imagefleet.validation import JSONDict, JSONObject, Strict

#: A message's record of its earlier deliveries (`imagefleet.storage.deliveries`), not of the job.
DELIVERIES_FIELD = "deliveries"

#: The first field of a bundle (`imagefleet.storage.bundle`), which names it.
BUNDLE_FIELD = "bundle"

#: A bundle's field with its jobs, each as the fields in which it differs from the others.
JOBS_FIELD = "jobs"

#: A message's digest of its job, `Job.digest`: one that was changed on its way is refused.
DIGEST_FIELD = "digest"

#: Names of a job, what is only handed through, and what is kept: two that differ in these draw the
#: same pictures.
_NOT_IN_DIGEST = chain.OF_JOB | {"metadata"}

#: What is computed of a job's fields, and of those of a copy anew.
_COMPUTED = (
    "digest",
    "stage_digest",
    "given_fields",
    "parsed_prompt",
    "parsed_negative_prompt",
    "detail_prompts",
)

#: Made once: `json.dumps` makes one for each text.
_TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ASCII_TEXT = json.JSONEncoder(separators=(",", ":"))

#: The field of an exported failed job that says why it failed, which is no part of the job.
FAILURE_FIELD = "failure"

#: More than any image of a job has: its pixels, and its file, of which pure noise has 12 MiB.
MAX_IMAGE_PIXELS = MAX_SIDE**2
MAX_IMAGE_BYTES = 32 * 2**20


#: `validation` says in words what these two are.
_SAFE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
SafeId = Annotated[str, StringConstraints(pattern=_SAFE_ID)]
SafeFileName = Annotated[str, StringConstraints(pattern=f"^{SAFE_NAME.pattern}$")]

DEFAULT_CAMPAIGN = "default"

#: Second drawings are in this folder, and no job's images: no campaign begins with a hyphen.
CHECKS = "-checks/"

#: Jobs of fewer steps are not drawn twice: 5 of 12 with 4 steps came out different, of 15 none.
COMPARABLE_STEPS = 10

#: Shards of records (`imagefleet.records`), below their campaign.
RECORDS = "-records/"

SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}


def is_safe_id(value: object) -> bool:
    """True for what may be the id of a job, or a campaign."""
    return isinstance(value, str) and re.fullmatch(_SAFE_ID, value) is not None


class Output(Strict):
    """Format of stored images; `quality` is for JPEG and WebP."""

    format: Literal["png", "jpeg", "webp"] = "png"
    quality: int = Field(default=90, ge=1, le=100)


class Job(
    PassFields,
    extra="forbid",
    frozen=True,
    allow_inf_nan=False,
    hide_input_in_errors=True,
):
    """A validated job; one that `read_job` returned has an `id` and a `seed`."""

    #: Program whose default values the job takes; None takes those of these classes.
    defaults: Literal["a1111-1.10"] | None = None
    model: SafeFileName | None = None
    id: SafeId | None = None
    campaign: SafeId | None = None
    output: Output = Output()
    metadata: Metadata = Field(default_factory=dict)
    #: A second drawing of the job's first image, to be compared; it is no result of the job.
    verify: bool = False
    #: The rule by which its images are judged before they are stored; None stores all.
    keep: Keep | None = None
    #: True if a client waits for its end, which its worker then records at once.
    awaited: bool = False
    #: The stages after this one, each with the fields in which it differs from the one before.
    then: tuple[dict[str, JsonValue], ...] = Field(
        default=(), max_length=chain.MAX_STAGES - 1
    )
    _place: Place | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_txt2img(cls, payload: object) -> object:
        if not isinstance(payload, dict):
            return payload
        fields = passes.fields_of_job(payload)
        if passes.only_upscales(fields):
            fields.setdefault("prompt", "")
        return fields

    @field_validator("then")
    @classmethod
    def _read_stages(cls, stages: tuple[JSONDict, ...]) -> tuple[JSONDict, ...]:
        return tuple(
            chain.fields_of_stage(number, each) for number, each in enumerate(stages, 2)
        )

    @model_validator(mode="after")
    def _means_its_guidance(self) -> Self:
        if self.cfg_scale == 0 and self.defaults is None:
            raise ValueError(
                "cfg_scale: 0 has two meanings: give 1 for no guidance, as diffusers spells 0, or"
                f' "defaults": "{settings_table.A1111}" for the negative prompt alone, as'
                " AUTOMATIC1111 draws it"
            )
        return self

    @model_validator(mode="after")
    def _text_fits_its_file(self) -> Self:
        if self.output.format == "jpeg":
            with validation.as_error(ValueError):
                sizes.check_jpeg_text("".join(self.shown_prompts))
        return self

    @model_validator(mode="after")
    def _stages_are_jobs(self) -> Self:
        if self.keep is not None:
            self._check_judged(self.keep)
        if not self.then:
            return self
        if self.images > 1:
            raise ValueError(
                f"{chain.THEN_FIELD}: the job asks for {self.images} images, and a chain makes one:"
                " send a job for each"
            )
        if self.verify:
            raise ValueError(
                f"{chain.THEN_FIELD}: a second drawing (verify) is of a job's first stage"
                " alone"
            )
        self.at_stage(len(self.then) + 1)
        return self

    def _check_judged(self, rule: Keep) -> None:
        """Raises ValueError for a job that its rule cannot judge."""
        if self.then or self.verify:
            raise ValueError(
                "keep: images of a chain (then) or a second drawing (verify) are not judged"
            )
        if self.images > MAX_JUDGED:
            raise ValueError(
                f"keep: {self.images} images of a job: {MAX_JUDGED} at most are judged together"
            )
        if rule.distinct is not None and self.kept_at_most > 1:
            raise ValueError(
                "keep: near-duplicates (distinct) are told apart where a job keeps one image: give"
                " best=1"
            )

    @property
    def kept_at_most(self) -> int:
        """The most of its images that are stored."""
        most = None if self.keep is None else self.keep.best
        return self.images if most is None else min(most, self.images)

    def identified(self, job_id: str, campaign: str | None = None) -> Self:
        """The job with *job_id*, a seed derived from its id, *campaign*, where it has none."""
        missing = self._missing(job_id, campaign)
        return self.model_copy(update=missing) if missing else self

    def _missing(self, job_id: str, campaign: str | None = None) -> JSONDict:
        missing: JSONDict = {}
        known_id = self.id or job_id
        if self.id != known_id:
            missing["id"] = known_id
        if self.seed < 0:
            stage = f"{chain.SEPARATOR}{self.place.number}" if self.place else ""
            missing["seed"] = _seed_from(known_id + stage)
        if self.subseed < 0 and self.subseed_strength:
            missing["subseed"] = _seed_from(f"{known_id}/subseed")
        if campaign and not self.campaign:
            missing["campaign"] = campaign
        return missing

    def model_copy(
        self, *, update: JSONObject | None = None, deep: bool = False
    ) -> Self:
        """A copy, in which all that is computed of the fields is computed anew."""
        copy = super().model_copy(update=update, deep=deep)
        # Nobody has seen the copy yet; pydantic 2.9 lets nothing be deleted of a frozen model.
        for name in _COMPUTED:
            copy.__dict__.pop(name, None)
        return copy

    def at_stage(self, number: int, message: str | None = None) -> Job:
        """The job of stage *number* of this job, from 1; raises ValueError if there is none."""
        known = self
        input_size = self.final_size
        for place, given in enumerate(self.then[: number - 1], start=2):
            before = known.model_dump(
                mode="json", include=set(chain.INHERITED), exclude_defaults=True
            )
            before |= known.defaults_denied
            fields = {
                **chain.inherited(before, given),
                **given,
                "id": self.id,
                "campaign": self.campaign,
                chain.INPUT_FIELD: [f"{img2img.IMAGES}{known.blob_name(0)}"],
            }
            with validation.as_error(ValueError, f"stage {place}: ", Job.model_fields):
                stage = Job.model_validate(fields).placed(
                    Place(self, known, place, message, input_size)
                )
                known = stage if self.id is None else stage.identified(self.id)
                input_size = known.final_size  # which may not fit the one before
        return known

    def stage_of_message(self, field: object) -> Job:
        """The stage that a message asks for in its *field* `stage`; raises InvalidMessageError."""
        with validation.as_error(InvalidMessageError, f"{chain.STAGE_FIELD}: "):
            asked = chain.StageField.model_validate(field)
        if asked.number > len(self.then) + 1:
            raise InvalidMessageError(
                f"{chain.STAGE_FIELD}: the job has no stage {asked.number} (it has"
                f" {self.stages})"
            )
        return self.at_stage(asked.number, asked.message)

    def placed(self, place: Place) -> Self:
        """This job, as the stage of another one that is at that place."""
        self._place = place
        return self

    @property
    def place(self) -> Place | None:
        """A later stage's place in its chain; None for a job as it was sent."""
        return self._place

    @property
    def whole(self) -> Job:
        """The whole job, of which this is a stage, as its message has it."""
        return self.place.job if self.place else self

    @property
    def input_size(self) -> PartialSize:
        return self.place.input_size if self.place else (None, None)

    @property
    def stage(self) -> int:
        """The number of this stage, from 1."""
        return self.place.number if self.place else 1

    @property
    def stages(self) -> int:
        return 1 + len(self.whole.then)

    def stages_left(self) -> Iterator[Job]:
        yield self
        for number in range(self.stage + 1, self.stages + 1):
            yield self.whole.at_stage(number)

    @property
    def stage_field(self) -> JSONDict:
        """The field `stage` of a message that asks for a later stage as if nobody had before."""
        return {"number": self.stage}

    def next_stage_field(self, message_id: str) -> JSONDict:
        """The field `stage` of the message for the stage after this one, which a message had."""
        return {"number": self.stage + 1, "message": self.source(message_id)}

    def source(self, message_id: str) -> str:
        """The message that a record is of: the first stage's, since all stages have one end."""
        return (self.place and self.place.message) or message_id

    @property
    def images_to_draw(self) -> int:
        return 1 if self.verify else self.images

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all that decides a job's images, those of every stage.

        A job's id stands for it: two jobs of one id with other digests are an error wherever they
        meet.
        """
        if self.place is not None:
            return self.place.job.digest
        if not self.then:
            return self.stage_digest
        whole = self if self.id is None else self.identified(self.id)
        return whole.at_stage(self.stages).stage_digest

    @functools.cached_property
    def stage_digest(self) -> str:
        """SHA-256 (hex) of all that decides this stage's images, the stages before it included."""
        fields = (
            self.given_fields
            if self.id is None
            else self.given_fields | self._missing(self.id)
        )
        if self.place is not None:
            fields = {**fields, chain.INPUT_FIELD: self.place.before.stage_digest}
        # Sorted, so that it does not depend on the order in which the classes name their fields.
        names = sorted(fields.keys() - _NOT_IN_DIGEST)
        text = pydantic_core.to_json({name: fields[name] for name in names})
        return hashlib.sha256(text).hexdigest()

    @functools.cached_property
    def given_fields(self) -> JSONDict:
        """The fields that differ from their defaults, as JSON has them."""
        return self.model_dump(
            mode="json", include=self.model_fields_set, exclude_defaults=True
        )

    @property
    def defaults_denied(self) -> JSONDict:
        """The fields for which it has its own defaults in spite of `defaults`, as JSON has them.

        A message tells them: left out, they would have the others' values.
        """
        if self.defaults is None or self.only_upscales:
            return {}
        others = settings_table.DEFAULTS[self.defaults].keys() & self.model_fields_set
        return self.model_dump(mode="json", include=others)

    def blob_name(self, index: int) -> str:
        """The name of image *index*: it follows from the job alone, so a retry finds it taken.

        The first has the job's own, whatever the job, so that two jobs of one id always meet.
        """
        folder = CHECKS if self.verify else ""
        stem = image_stem(job_key(self.campaign, self.id), index, self.stage)
        return f"{folder}{stem}.{SUFFIXES[self.output.format]}"

    def to_message(self, signer: JobSigner | None = None) -> str:
        """The whole job in a line of JSON, with the stage's number; signed by *signer*."""
        job = self.whole
        denied = job.defaults_denied
        fields = job.given_fields | denied
        if denied:
            # In the order of all messages, so that jobs with other defaults fit one bundle.
            fields = {name: fields[name] for name in Job.model_fields if name in fields}
        if job.id is not None:
            fields[DIGEST_FIELD] = job.digest
        if signer is not None:
            if job.id is None:
                raise ValueError("a signed job needs an id")
            fields[SIGNATURE_FIELD] = signer.sign(fields)
        if self.place is not None:
            fields[chain.STAGE_FIELD] = self.stage_field
        return compact_text(fields)


class Place(NamedTuple):
    """A later stage's place in its job: `number` counts from 1."""

    job: Job
    #: The stage before.
    before: Job
    number: int
    #: The id of the message of the first stage, or of the one that was replayed.
    message: str | None
    #: Width and height of the image of the stage before, as far as the job tells.
    input_size: PartialSize


def read_job(
    body: str,
    message_id: str,
    trusted: TrustedJobs | None = None,
    defaults: str | None = None,
    keep: Keep | None = None,
) -> Job:
    """Reads a job from a message: plain JSON, or JSON in base64 as Azure Functions send it.

    A job without an id takes the message's; a seed follows from its id, so that a retry draws the
    same. *defaults* are those of a job without any that is neither signed nor was read before,
    *keep* the rule of one that does not say what to keep.
    Raises InvalidMessageError, which says why, or UntrustedJobError if not *trusted*.
    """
    try:
        fields = message_fields(body)
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON: {error}" if body.strip() else "is empty"
        raise InvalidMessageError(f"the message {reason}") from None
    if not isinstance(fields, dict):
        raise InvalidMessageError("the message is JSON, but no object")
    fields.pop(DELIVERIES_FIELD, None)
    signature = fields.pop(SIGNATURE_FIELD, None)
    stage = fields.pop(chain.STAGE_FIELD, None)
    if trusted is not None:
        trusted.check(fields, signature)
    digest = fields.pop(DIGEST_FIELD, None)
    if defaults and digest is None and signature is None:
        fields.setdefault("defaults", defaults)
    if keep is not None:
        fields.setdefault("keep", keep)
    with validation.as_error(InvalidMessageError, known=Job.model_fields):
        job = Job.model_validate(fields)
    if job.then and stage is None:
        # Its text as the messages of later stages have it, maybe longer than it was sent.
        signed = {} if signature is None else {SIGNATURE_FIELD: signature}
        most = sizes.MAX_MESSAGE_BYTES - sizes.STAGE_BYTES
        if sizes.message_bytes(message_text(fields | signed)) > most:
            raise InvalidMessageError(
                f"the job with its stages takes more than {most:,} bytes"
            )
    job = job.identified(message_id)
    if digest is not None and digest != job.digest:
        raise InvalidMessageError(
            f"{DIGEST_FIELD}: it is of another job than this one; a job that was changed goes"
            " without it"
        )
    return job if stage is None else job.stage_of_message(stage)


def message_fields(body: str) -> Any:
    """The JSON of a message, plain or in base64; raises ValueError or RecursionError for others.

    Base64 may be in lines, url-safe or without padding; either may begin with a byte order mark.
    """
    text = body.strip().removeprefix(sizes.BYTE_ORDER_MARK)
    return json.loads(
        text if text.lstrip()[:1] in {"{", "["} else sizes.from_base64(text)
    )


def message_text(fields: JSONObject) -> str:
    """The text of a message; its fields may be of no valid job."""
    # Half of a surrogate pair, in a field that no job reads, goes on as its sender escaped it.
    return _for_xml(_TEXT.encode(fields)).encode(errors="backslashreplace").decode()


def compact_text(fields: JSONObject) -> str:
    """The text of a valid job's message, much faster than `message_text`."""
    return _for_xml(pydantic_core.to_json(fields).decode())


def _for_xml(text: str) -> str:
    """The text without two characters that XML excludes, in which Azure carries messages."""
    return text.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def text_for_image(body: str, job: Job) -> str:
    """The message as it was received, with the job's id, in ASCII for its image's file."""
    fields = message_fields(body)
    fields.pop(DELIVERIES_FIELD, None)
    if not fields.get("id"):  # which no signed job lacks
        fields["id"] = job.id
    if job.place is not None:
        fields[chain.STAGE_FIELD] = job.stage_field
    if SIGNATURE_FIELD not in fields:  # which is of what was sent alone
        fields.setdefault(DIGEST_FIELD, job.digest)
    return _ASCII_TEXT.encode(fields)


def images_of(body: str) -> int:
    """Number of images that a message asks for, as far as it can be read, valid job or not."""
    if body.startswith("{") and not ("batch_size" in body or "n_iter" in body):
        return 1  # the most common case, without parsing it
    fields = fields_if_any(body)
    counts = [fields.get("batch_size", 1), fields.get("n_iter", 1)]
    if fields.get("verify") or not all(
        isinstance(each, int) and each > 0 for each in counts
    ):
        return 1
    return min(int(math.prod(counts)), MAX_IMAGES_PER_JOB)


def is_bundle(body: str) -> bool:
    """True if a message is a bundle, as those who send some write it."""
    return body.startswith(f'{{"{BUNDLE_FIELD}":')


def is_signed(body: str) -> bool:
    """True if a message carries a signature, which may be anyone's."""
    if body.startswith("{") and SIGNATURE_FIELD not in body:
        return False  # the most common case, without parsing it
    return SIGNATURE_FIELD in fields_if_any(body)


def fields_if_any(body: str) -> JSONDict:
    """The fields of a message, none if they cannot be read."""
    try:
        fields = message_fields(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def job_key(campaign: str | None, job_id: str | None) -> str:
    """Identifies a job within its storage."""
    return f"{campaign or DEFAULT_CAMPAIGN}/{job_id}"


def image_stem(key: str, index: int, stage: int = 1) -> str:
    """The name, without its suffix, of an image of the job *key* (`campaign/id`).

    No other job has it, since no id contains the separator.
    """
    number = f"s{stage}" if stage > 1 else f"{index}" if index else ""
    return f"{key}{chain.SEPARATOR}{number}" if number else key


def _seed_from(job_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=4).digest())

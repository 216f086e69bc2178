"""The record of one image, or of one job that ended without.

Records are untrusted: whoever may store images may write records, too.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from imagefleet import validation
from imagefleet.errors import JobError, NameTakenError
from imagefleet.files.marks import Mark
from imagefleet.job.chain import MAX_STAGES
from imagefleet.job.message import (
    DEFAULT_CAMPAIGN,
    MAX_IMAGE_BYTES,
    Job,
    SafeId,
    image_stem,
    job_key,
)
from imagefleet.job.noise import MAX_SEED
from imagefleet.job.prompt import LoraTag
from imagefleet.job.sizes import (
    MAX_BLOB_NAME,
    MAX_IMAGES_PER_JOB,
    MAX_MESSAGE_BYTES,
    metadata_header,
    read_metadata_header,
)
from imagefleet.keeping.duplicates import Hashed
from imagefleet.keeping.rule import MAX_JUDGED, Keep
from imagefleet.storage.protocol import Metadata
from imagefleet.validation import JSONObject

#: No job waits longer in a worker, and no worker starts for longer.
_LONGEST_SECONDS = 7 * 24 * 3600
MAX_NAME_CHARACTERS = 200

#: Scores of one image.
MAX_SCORES = 32

#: The worker of an image whose metadata nobody could read, or somebody has changed.
UNKNOWN_WORKER = "?"

_Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARACTERS)]
_BlobName = Annotated[str, StringConstraints(max_length=MAX_BLOB_NAME)]
_Text = Annotated[str, StringConstraints(max_length=MAX_MESSAGE_BYTES)]
#: What columns of tables and plots hold; a clock that was never set is in 1970.
_Number = Annotated[int, Field(ge=0, lt=2**53)]
_Moment = Annotated[
    AwareDatetime,
    Field(ge=datetime(1970, 1, 1, tzinfo=UTC), lt=datetime(3000, 1, 1, tzinfo=UTC)),
]
_Stage = Annotated[int, Field(ge=1, le=MAX_STAGES)]
_Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_SECONDS)]

#: `completed` and `replaced` are of one image, the others of a job: the last two an operator's.
Outcome = Literal[
    "completed",
    "failed",
    "cancelled",
    "dropped",
    "replayed",
    "discarded",
    "replaced",
]

#: How jobs end, as their workers say it.
ENDS: tuple[Outcome, ...] = ("completed", "failed", "cancelled", "dropped")


#: More than any image of a job has; a sum of many stays a number that every table holds.
_Size = Annotated[int, Field(ge=0, le=MAX_IMAGE_BYTES)]

#: What the metadata of an image's blob have by the same names.
_OF_BLOB = (
    "worker",
    "gpu",
    "price_per_hour",
    "started_at",
    "start_up_seconds",
    "seconds",
    "images",
    "stage",
    "stages",
    "seed",
    "digest",
    "sha256",
    "phash",
)

#: What its worker proves of an image's record.
_PROVEN = {
    "blob",
    "pack",
    "offset",
    "size_bytes",
    "digest",
    "sha256",
    "at",
    "seconds",
    "model",
    "worker",
    "gpu",
    "started_at",
    "start_up_seconds",
    "price_per_hour",
}

#: What a job has by the same names; the second are of how it is drawn.
_OF_JOB = (
    "id",
    "images",
    "stage",
    "stages",
    "prompt",
    "negative_prompt",
    "metadata",
    "keep",
)
_OF_DRAWING = ("sampler", "steps", "cfg_scale", "clip_skip")


class Lora(NamedTuple):
    name: _Name
    weight: float


class Embedding(NamedTuple):
    """A textual inversion embedding that the prompts name, and the SHA-256 of its file."""

    name: _Name
    sha256: _Name


class DroppedImage(NamedTuple):
    """An image of a job that was judged, and not stored."""

    #: Its position among the images that were drawn, from 0.
    number: int
    reason: _Name
    scores: dict[_Name, float]


class Spot(NamedTuple):
    """Where the file of an image is: a blob, or `size_bytes` of its pack from *offset* on."""

    blob: str
    pack: str | None = None
    offset: int = 0
    size_bytes: int = 0


class Record(BaseModel, frozen=True, allow_inf_nan=False, hide_input_in_errors=True):
    """One line of a shard: an image, or a job that ended otherwise."""

    outcome: Outcome
    blob: _BlobName | None = None
    #: The job's id; that of its message where the job could not be read.
    id: SafeId
    #: `Job.stage_digest` of an image, else `Job.digest`; None of what could not be read.
    digest: _Sha256 | None = None
    campaign: SafeId = DEFAULT_CAMPAIGN
    #: The time at which the image was stored, or the job ended; by the storage's clock.
    at: _Moment
    #: The id of the message that carried the job.
    source: _Name | None = None
    #: Deliveries of the message; of a failed job, how often it was tried.
    attempts: int = Field(default=1, ge=1, le=1_000_000)
    worker: _Name = UNKNOWN_WORKER
    gpu: _Name | None = None
    started_at: _Moment | None = None
    start_up_seconds: _Seconds = 0
    #: US dollars.
    price_per_hour: float | None = Field(default=None, ge=0, le=1_000)

    size_bytes: _Size | None = None
    #: SHA-256 (hex) of the image's file.
    sha256: _Sha256 | None = None
    #: The blob of the pack that the image is in, which then has none of its own.
    pack: _BlobName | None = None
    #: Where the image's file begins in its pack; it has `size_bytes`.
    offset: _Size | None = None
    #: The image's position among the job's images, from 0.
    index: int = Field(default=0, ge=0, lt=MAX_IMAGES_PER_JOB)
    images: int = Field(default=1, ge=1, le=MAX_IMAGES_PER_JOB)
    #: A job of several images is complete with this one.
    completes: bool | None = None
    #: Seconds from the pull of the job to the image's upload.
    seconds: _Seconds | None = None
    #: The stage of a job with `then` that this record is of.
    stage: _Stage = 1
    stages: _Stage = 1

    prompt: _Text | None = None
    negative_prompt: _Text | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    model: _Name | None = None
    sampler: _Name | None = None
    steps: _Number | None = None
    cfg_scale: float | None = None
    clip_skip: _Number | None = None
    width: _Number | None = None
    height: _Number | None = None
    loras: tuple[Lora, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    #: What the image's file says of its origin; None: nothing, or it is not known.
    mark: Mark | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    #: The rule by which the job's images were judged.
    keep: Keep | None = None
    #: Scores of the image; of a dropped job, those of its best one.
    scores: dict[_Name, float] = Field(default_factory=dict, max_length=MAX_SCORES)
    #: The job's images that were not stored; its first stored image tells them, or its end.
    dropped: tuple[DroppedImage, ...] = Field(default=(), max_length=MAX_JUDGED)
    #: Perceptual hash of an image whose near-duplicates are dropped.
    phash: Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")] | None = None

    error: _Name | None = None
    reason: _Text | None = None
    #: The message that replays a failed job.
    body: _Text | None = None
    #: Signature of `claims` by the machine of its worker.
    proof: Annotated[str, StringConstraints(pattern=r"^[\w-]{22}$")] | None = None

    @property
    def key(self) -> str:
        """`campaign/id`, which identifies the job within its storage."""
        return job_key(self.campaign, self.id)

    @property
    def job(self) -> int:
        """A hash of its job: of its name and its digest."""
        return hashed(f"{self.key} {self.digest}")

    @property
    def failure(self) -> int:
        """A hash of one end of a job: of one message, however often a fault has it written."""
        return hashed(f"{self.source} {self.job}")

    @property
    def first_seed(self) -> int | None:
        """The seed of the job's first image."""
        return None if self.seed is None else max(0, self.seed - self.index)

    @property
    def completes_job(self) -> bool:
        """True for the image by which its job is counted as completed."""
        return self.stage == self.stages and (self.images == 1 or bool(self.completes))

    @property
    def is_end(self) -> bool:
        """True if a worker says that its job ended without all of its images."""
        return self.outcome in {"failed", "cancelled", "dropped"}

    @property
    def hashed(self) -> Hashed | None:
        """The image as one that may be a near-duplicate; None if its job keeps those."""
        if self.phash is None or self.keep is None or self.keep.distinct is None:
            return None
        rank = self.keep.rank(self.scores)
        return Hashed(rank, self.id, int(self.phash, 16), self.keep.distinct)

    def as_near_duplicate(self, other: str) -> Record:
        """The end of its job instead, where the image of the job *other* is the better one."""
        reason = f"near-duplicate of {other}"
        return self.model_copy(
            update={"outcome": "dropped", "blob": None, "reason": reason}
        )

    @property
    def claims(self) -> bytes:
        """Bytes that `proof` signs: who has drawn which image, when, and at what cost."""
        return self.model_dump_json(include=_PROVEN).encode()

    @property
    def spot(self) -> Spot:
        blob = self.blob or ""
        if self.pack is None:
            return Spot(blob)
        return Spot(blob, self.pack, self.offset or 0, self.size_bytes or 0)

    @property
    def has_own_name(self) -> bool:
        return self.stem == image_stem(self.key, self.index, self.stage)

    @property
    def stem(self) -> str:
        return (self.blob or "").rpartition(".")[0]

    def fits(self, metadata: Metadata, *, of_any_drawing: bool = False) -> bool:
        """True if it is of the image that is stored with this *metadata*, as far as that tells.

        *of_any_drawing*: another drawing of its job may have the name, of other bytes.
        """
        spot = None if self.pack is None else str(self.spot)
        is_there = not metadata or metadata.get("spot") == spot
        if metadata.get("digest") not in {None, self.digest}:
            return False
        return of_any_drawing or (
            is_there and metadata.get("sha256") in {None, self.sha256}
        )

    def name_taken(self, metadata: Metadata) -> Record:
        """The end of its job instead, where the image with this *metadata* is another job's."""
        reason = (
            f"its name is taken: {self.blob} is the image of the job {self.key} with the digest"
            f" {metadata.get('digest', 'unknown')[:64]}, and this job's is {self.digest}; give one"
            " of them another id"
        )
        error = NameTakenError.__name__
        return self.model_copy(
            update={"outcome": "failed", "blob": None, "error": error, "reason": reason}
        )

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Parses a line of a shard; raises JobError, which says in a sentence why it is none."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise JobError(validation.sentence(error)) from None

    @classmethod
    def of_blob(cls, known: JSONObject, metadata: Metadata) -> Self:
        """The record of an image, of which *known* is certain, from the *metadata* of its blob."""
        try:
            told = {name: metadata[name] for name in _OF_BLOB if name in metadata}
            if "attempt" in metadata:
                told["attempts"] = metadata["attempt"]
            if "scores" in metadata:
                told["scores"] = json.loads(metadata["scores"])
            if "metadata" in metadata:
                told["metadata"] = read_metadata_header(metadata["metadata"])
            return cls.model_validate({**told, **known})
        except ValueError:  # JSON that is none, or pydantic's ValidationError
            return cls.model_validate(known)

    def blob_metadata(self) -> dict[str, str]:
        """What `of_blob` reads again, in ASCII, of an image by its record."""
        told = self.model_dump(mode="json", include={*_OF_BLOB}, exclude_defaults=True)
        told |= {"job": self.id, "attempt": self.attempts, "campaign": self.campaign}
        told["worker"] = self.worker.encode("ascii", "replace").decode()
        if self.scores:
            told["scores"] = json.dumps(self.scores)
        if self.metadata:
            told["metadata"] = metadata_header(self.metadata)
        return {name: str(value) for name, value in told.items()}

    def line(self) -> bytes:
        """The record as a line of JSON, without what it lacks."""
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


def hashed(text: str) -> int:
    """A hash of 64 bits, to remember what was seen in less memory than the text takes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def of_job(job: Job) -> dict[str, object]:
    """The fields that a job tells; one that only enlarges has those that its chain has drawn by."""
    is_drawn = not job.only_upscales or job.stage > 1
    return {
        "campaign": job.campaign or DEFAULT_CAMPAIGN,
        "digest": job.stage_digest,
        "loras": tuple(Lora(each.name, each.unet_weight) for each in _applied(job)),
        **{
            name: getattr(job, name)
            for name in (_OF_JOB + _OF_DRAWING if is_drawn else _OF_JOB)
        },
    }


def _applied(job: Job) -> list[LoraTag]:
    """The LoRAs of a job's passes; one that the prompt names twice is applied twice."""
    first = job.parsed_prompt.loras
    return [*first, *(each for each in job.loras if each not in first)]

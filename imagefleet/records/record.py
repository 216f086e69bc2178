"""The record of one image, or of one job that ended without, and the log that stores records.

They are untrusted: whoever may store images may write records, too. The log's shards are gzip
members of JSON lines, each followed by an empty one with totals; `zcat` reads them. The totals lie
in the extra field of the empty member's header, so that the end of a shard tells what is in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from cachetools import LRUCache
from pydantic import (
    AwareDatetime,
    BaseModel,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)

from imagefleet import concurrency, errors, validation
from imagefleet.job.chain import MAX_STAGES
from imagefleet.job.message import (
    DEFAULT_CAMPAIGN,
    MAX_IMAGE_BYTES,
    RECORDS,
    Job,
    SafeId,
    image_stem,
    job_key,
)
from imagefleet.job.samplers import MAX_IMAGES_PER_JOB
from imagefleet.job.sizes import MAX_BLOB_NAME, MAX_MESSAGE_BYTES, read_metadata_header
from imagefleet.storage.protocol import BlobStore

#: No job waits longer in a worker, and no worker starts for longer.
_LONGEST_SECONDS = 7 * 24 * 3600
MAX_NAME_CHARACTERS = 200

_Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARACTERS)]
_Text = Annotated[str, StringConstraints(max_length=MAX_MESSAGE_BYTES)]
#: What columns of tables and plots hold; a clock that was never set is in 1970.
_Number = Annotated[int, Field(ge=0, lt=2**53)]
_Moment = Annotated[
    AwareDatetime,
    Field(ge=datetime(1970, 1, 1, tzinfo=UTC), lt=datetime(3000, 1, 1, tzinfo=UTC)),
]
_Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_SECONDS)]

Outcome = Literal[
    "completed", "failed", "cancelled", "replayed", "discarded", "replaced"
]
"""`completed` and `replaced` are of one image, the others of a job: the last two an operator's."""


#: More than any image of a job has; a sum of many stays a number that every table holds.
_Size = Annotated[int, Field(ge=0, le=MAX_IMAGE_BYTES)]

#: What the metadata of an image's blob have by the same names.
_OF_BLOB = (
    *("worker", "gpu", "price_per_hour", "start_up_seconds", "seconds"),
    *("images", "stage", "stages", "seed", "digest", "sha256"),
)

#: What its worker proves of an image's record.
_PROVEN = {
    *(
        "blob",
        "digest",
        "sha256",
        "at",
        "seconds",
        "model",
        "worker",
        "gpu",
        "started_at",
    ),
    *("start_up_seconds", "price_per_hour"),
}

#: What a job has by the same names; the second are of how it is drawn.
_OF_JOB = ("id", "images", "stage", "stages", "prompt", "negative_prompt", "metadata")
_OF_DRAWING = ("sampler", "steps", "cfg_scale", "clip_skip")

#: `again` are images whose names were taken; most of them have a record in `images`. `settled` are
#: failures that were replayed or discarded; an empty shard `cancelled` says that a campaign was.
Kind = Literal["again", "cancelled", "images", "jobs", "replaced", "settled"]

#: The kinds that only the operator writes. They lie among the files, where workers have no token.
OPERATORS: frozenset[Kind] = frozenset({"cancelled", "replaced", "settled"})

KINDS: Mapping[Outcome, Kind] = {
    "completed": "images",
    "failed": "jobs",
    "cancelled": "jobs",
    "replayed": "settled",
    "discarded": "settled",
    "replaced": "replaced",
}

#: The most bytes in a member's lines. Azure appends 4 MiB at once; a record has 200 KiB at most.
MAX_MEMBER_BYTES = 3 * 2**20

_NAME = re.compile(
    rf"{re.escape(RECORDS)}(?P<campaign>[^/]+)/[^/]+\.(?P<kind>{'|'.join(get_args(Kind))})\.jsonl\.gz"
)

#: An empty gzip member whose header has one extra field, `IF`: lines, and completed jobs.
_BEFORE_TOTALS = struct.pack("<4s5xBH2sH", b"\x1f\x8b\x08\x04", 255, 20, b"IF", 16)
_TOTALS = struct.Struct("<QQ")
_AFTER_TOTALS = b"\x03\x00" + bytes(8)
TOTALS_BYTES = len(_BEFORE_TOTALS) + _TOTALS.size + len(_AFTER_TOTALS)

#: Half of most lines are digests, which no level makes smaller: the highest takes twice as long.
_LEVEL = 3

#: zlib's parameter for a gzip member.
GZIP = 31

#: Azure appends 50,000 times to one blob; smaller shards are read side by side.
_MAX_APPENDS = 40_000
_MAX_BYTES = 64 * 2**20

#: Shards that one process keeps open, of as many campaigns.
_MAX_OPEN = 1_000

#: Shards with a random name each that are tried, should somebody else write to one.
_TRIES = 3

#: The retries of writing: only one process writes to a shard, so a lost reply is asked for again.
RETRIES = concurrency.RetryPolicy(
    tries=8, first_wait_seconds=0.5, longest_wait_seconds=30
)


class Lora(NamedTuple):
    name: _Name
    weight: float


class Embedding(NamedTuple):
    """A textual inversion embedding that the prompts name, and the SHA-256 of its file."""

    name: _Name
    sha256: _Name


class Record(BaseModel, frozen=True, allow_inf_nan=False, hide_input_in_errors=True):
    """One line of a shard: an image, or a job that ended otherwise."""

    outcome: Outcome
    blob: Annotated[str, StringConstraints(max_length=MAX_BLOB_NAME)] | None = None
    id: SafeId
    """The job's id; that of its message where the job could not be read."""
    digest: _Sha256 | None = None
    """`Job.stage_digest` of an image, else `Job.digest`; None of what could not be read."""
    campaign: SafeId = DEFAULT_CAMPAIGN
    at: _Moment
    """The time at which the image was stored, or the job ended; by the storage's clock."""
    source: _Name | None = None
    """The id of the message that carried the job."""
    attempts: int = Field(default=1, ge=1, le=1_000_000)
    """Deliveries of the message; of a failed job, how often it was tried."""
    worker: _Name = "?"
    gpu: _Name | None = None
    started_at: _Moment | None = None
    start_up_seconds: _Seconds = 0
    price_per_hour: float | None = Field(default=None, ge=0, le=1_000)
    """US dollars."""

    size_bytes: _Size | None = None
    sha256: _Sha256 | None = None
    """SHA-256 (hex) of the image's file."""
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
    reason: _Text | None = None
    body: _Text | None = None
    """The message that replays a failed job."""
    proof: Annotated[str, StringConstraints(pattern=r"^[\w-]{22}$")] | None = None
    """Of `claims`, by the machine of its worker."""

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
    def completes_job(self) -> bool:
        """Whether this image is the one by which its job is counted as completed."""
        return self.stage == self.stages and (self.images == 1 or bool(self.completes))

    @property
    def is_end(self) -> bool:
        """Whether a worker says that its job ended without all of its images."""
        return self.outcome in {"failed", "cancelled"}

    @property
    def claims(self) -> bytes:
        """What `proof` is of: who has drawn which image, when, and at what cost."""
        return self.model_dump_json(include=_PROVEN).encode()

    @property
    def has_own_name(self) -> bool:
        return self.stem == image_stem(self.key, self.index, self.stage)

    @property
    def stem(self) -> str:
        return (self.blob or "").rpartition(".")[0]

    def fits(
        self, metadata: Mapping[str, str], *, of_any_drawing: bool = False
    ) -> bool:
        """Whether it is of the image that is stored with this *metadata*, as far as that tells.

        *of_any_drawing*: another drawing of its job may have the name, of other bytes.
        """
        names = ("digest",) if of_any_drawing else ("digest", "sha256")
        return all(metadata.get(name) in {None, getattr(self, name)} for name in names)

    def name_taken(self, metadata: Mapping[str, str]) -> Record:
        """The end of its job instead, where the image with this *metadata* is another job's."""
        reason = (
            f"its name is taken: {self.blob} is the image of the job {self.key} with the digest"
            f" {metadata.get('digest', 'unknown')[:64]}, and this job's is {self.digest}; give one"
            " of them another id"
        )
        failed = {
            "outcome": "failed",
            "blob": None,
            "error": errors.NameTakenError.__name__,
        }
        return self.model_copy(update={**failed, "reason": reason})

    @classmethod
    def read(cls, line: bytes) -> Self:
        """Parses a line of a shard; raises JobError, which says in a sentence why it is none."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise errors.JobError(validation.sentence(error)) from None

    @classmethod
    def of_blob(cls, known: Mapping[str, Any], metadata: Mapping[str, str]) -> Self:
        """The record of an image, of which *known* is certain, from the *metadata* of its blob."""
        try:
            told: dict[str, Any] = {
                name: metadata[name] for name in _OF_BLOB if name in metadata
            }
            if "attempt" in metadata:
                told["attempts"] = metadata["attempt"]
            if "metadata" in metadata:
                told["metadata"] = read_metadata_header(metadata["metadata"])
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
    """The fields that a job tells; one that only enlarges has those that its chain has drawn by."""
    is_drawn = not job.only_upscales or job.stage > 1
    return {
        "campaign": job.campaign or DEFAULT_CAMPAIGN,
        "digest": job.stage_digest,
        "loras": tuple(Lora(each.name, each.unet_weight) for each in job.loras),
        **{
            name: getattr(job, name)
            for name in (_OF_JOB + _OF_DRAWING if is_drawn else _OF_JOB)
        },
    }


class Totals(NamedTuple):
    """What a shard holds: its records, and the jobs that are complete with one of them."""

    records: int = 0
    jobs: int = 0


class ShardName(NamedTuple):
    """What a shard's name says."""

    campaign: str
    kind: Kind

    @classmethod
    def read(cls, blob: str) -> ShardName | None:
        """The name's parts; None for a blob that is no shard."""
        match = _NAME.fullmatch(blob)
        return cls(match["campaign"], match["kind"]) if match else None  # type: ignore[arg-type]


def shard_folder(campaign: str) -> str:
    return f"{RECORDS}{campaign}/"


def shard_part(lines: Iterable[bytes], totals: Totals) -> bytes:
    """What to append: *lines*, and the *totals* of the shard with them."""
    compressor = zlib.compressobj(_LEVEL, wbits=GZIP)
    data = compressor.compress(b"".join(lines)) + compressor.flush()
    return data + _BEFORE_TOTALS + _TOTALS.pack(*totals) + _AFTER_TOTALS


def totals_at(end: bytes) -> Totals | None:
    """The totals in a shard's last `TOTALS_BYTES`; None if it ends otherwise."""
    is_whole = end.startswith(_BEFORE_TOTALS) and end.endswith(_AFTER_TOTALS)
    if not is_whole or len(end) != TOTALS_BYTES:
        return None
    found = Totals(*_TOTALS.unpack_from(end, len(_BEFORE_TOTALS)))
    return found if found.jobs <= found.records else None


@dataclass(slots=True)
class _Shard:
    """The open shard of one campaign and kind."""

    folder: str
    writer: str
    kind: Kind
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    name: str = ""
    position: int = 0
    appends: int = 0
    totals: Totals = field(default_factory=Totals)

    def begin(self, now: datetime) -> None:
        """The next append creates a new blob."""
        start = (
            f"{self.folder}{now:%Y%m%dT%H%M%SZ}-{self.writer}-{secrets.token_hex(4)}"
        )
        self.name = f"{start}.{self.kind}.jsonl.gz"
        self.position = self.appends = 0
        self.totals = Totals()


class RecordLog:
    """Adds records to the campaigns' shards; each call is durable when it returns."""

    def __init__(
        self,
        blobs: BlobStore,
        writer: str,
        retry_policy: concurrency.RetryPolicy = RETRIES,
    ) -> None:
        """*blobs*: the images of a worker's records, the files for the kinds of the operator.

        *writer*, a worker's name say, becomes part of the shards' names.
        """
        self._blobs = blobs
        self._writer = re.sub(r"[^A-Za-z0-9._-]", "_", writer)[:100] or "_"
        self._retry_policy = retry_policy
        self._shards: LRUCache[tuple[str, Kind], _Shard] = LRUCache(_MAX_OPEN)

    async def add(self, records: Iterable[Record], *, again: bool = False) -> None:
        """Adds records, those of images as `images`, or *again* if their names were taken."""
        grouped: dict[tuple[str, Kind], list[Record]] = {}
        for record in records:
            is_again = again and record.outcome == "completed"
            kind: Kind = "again" if is_again else KINDS[record.outcome]
            grouped.setdefault((record.campaign, kind), []).append(record)
        await concurrency.gather(*(self._append(*each) for each in grouped.items()))

    async def open(self, campaign: str, kind: Kind) -> None:
        """Begins a shard, and adds no record; raises SetupError if none may be written."""
        await self._append((campaign, kind), [])

    async def _append(self, to: tuple[str, Kind], records: Sequence[Record]) -> None:
        if (shard := self._shards.get(to)) is None:
            campaign, kind = to
            shard = self._shards[to] = _Shard(
                shard_folder(campaign), self._writer, kind
            )
        jobs = sum(record.completes_job for record in records)
        *parts, last = _parts(record.line() for record in records)
        async with shard.lock:
            for part in parts:
                await self._append_part(shard, part, 0)
            await self._append_part(shard, last, jobs)

    async def _append_part(self, to: _Shard, lines: list[bytes], jobs: int) -> None:
        if not to.name or to.appends >= _MAX_APPENDS or to.position >= _MAX_BYTES:
            to.begin(self._blobs.clock.now())
        for _ in range(_TRIES):
            totals = Totals(to.totals.records + len(lines), to.totals.jobs + jobs)
            append = partial(self._append_once, to, data := shard_part(lines, totals))
            try:
                is_appended = await self._retry_policy.call_in_doubt(append)
            except BaseException:
                to.name = ""  # nobody knows how long it is
                raise
            if is_appended:
                to.position += len(data)
                to.appends += 1
                to.totals = totals
                return
            to.begin(self._blobs.clock.now())
        raise errors.TransientError(
            f"somebody else writes to the records in {to.folder}"
        )

    async def _append_once(self, to: _Shard, data: bytes, is_in_doubt: bool) -> bool:
        return await self._blobs.append(to.name, data, to.position) or is_in_doubt


def _parts(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines for one member each; at least one, which may be empty."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        if part and size + len(line) > MAX_MEMBER_BYTES:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield part

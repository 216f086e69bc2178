"""A sweep's manifest, `sweep.json` beside the campaign's records, and as untrusted: its groups."""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue, StringConstraints

from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.job.message import SafeFileName, SafeId
from imagefleet.records.log import shard_folder
from imagefleet.storage.open import Storage

MAX_GROUPS = 10_000

#: The largest file of a sweep: some 300 bytes a group.
MAX_BYTES = 4 * 2**20

GroupName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$", max_length=100)
]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class Captions(BaseModel, extra="ignore", frozen=True):
    """Captions that all groups draw, in order; the SHA-256 is of the captions as lines of UTF-8."""

    count: _Count
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Group(BaseModel, extra="ignore", frozen=True, allow_inf_nan=False):
    """The images that differ by their captions alone."""

    name: GroupName
    guidance: float
    #: The sampler's key (`imagefleet.job.samplers`).
    sampler: Annotated[str, StringConstraints(max_length=200)]
    steps: _Count
    model: SafeFileName | None = None
    lora: SafeFileName | None = None
    lora_strength: float | None = None


class Sweep(BaseModel, extra="ignore", frozen=True):
    """The captions and groups of a campaign: each group has one image of each caption."""

    version: Literal[1] = 1
    campaign: SafeId
    captions: Captions
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=MAX_GROUPS)]
    #: Another one gives each caption another seed (`seed_of`).
    seed: _Count = 0
    job: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def images(self) -> int:
        return self.captions.count * len(self.groups)


def job_id(group: str, number: int) -> str:
    """The id of a group's image of caption *number*, from 0: `cfg-3.0_000017`."""
    return f"{group}_{number:06}"


def seed_of(number: int, caption: str, seed: int = 0) -> int:
    """Seed shared by a caption's images in every group; depends only on caption and index."""
    text = f"{seed} {number} {caption}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def digest(captions: Iterable[str]) -> Captions:
    """Counts and hashes captions, each without line breaks, as they come."""
    hasher = hashlib.sha256()
    count = 0
    for caption in captions:
        hasher.update(caption.encode() + b"\n")
        count += 1
    return Captions(count=count, sha256=hasher.hexdigest())


async def read(storage: Storage, campaign: str) -> Sweep | None:
    """The sweep that a campaign is, or None; raises SetupError if its manifest is damaged."""
    part = await storage.blobs.read_part(_name(campaign), 0, MAX_BYTES)
    if part is None:
        return None
    with validation.as_error(
        SetupError, f"{_name(campaign)} is not a sweep's manifest: "
    ):
        found = Sweep.model_validate_json(part.data)
    if found.campaign != campaign:
        raise SetupError(f"{_name(campaign)} is the manifest of another campaign")
    return found


async def write(storage: Storage, sweep: Sweep) -> None:
    """Stores a manifest, if it is not there already; raises SetupError if that is another one."""
    data = sweep.model_dump_json(indent=1, exclude_none=True).encode() + b"\n"
    if await storage.blobs.create(_name(sweep.campaign), data, "application/json", {}):
        return
    found = await read(storage, sweep.campaign)
    if found is not None and found != sweep:
        raise SetupError(
            f"campaign {sweep.campaign} is another sweep already: {_difference(found, sweep)};"
            " choose another --campaign"
        )


def _difference(stored: Sweep, given: Sweep) -> str:
    if stored.captions != given.captions:
        return f"it has {stored.captions.count:,} other captions"
    differing = set(stored.groups) ^ set(given.groups)
    if differing:
        names = sorted({group.name for group in differing})
        return f"its groups differ by {', '.join(names[:5])}"
    return "its seed, its size or another field of all its jobs differs"


def _name(campaign: str) -> str:
    return f"{shard_folder(campaign)}sweep.json"

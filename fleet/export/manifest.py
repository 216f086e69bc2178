"""`manifest.json`: what an export holds, and the hashes to check it by."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fleet.export.plan import Format, Plan
from fleet.results import files
from imagefleet import errors

MANIFEST = "manifest.json"

#: Named of the images that are missing or changed; a shard's Parquet file has all of them.
_NAMED = 1_000


class File(BaseModel):
    """A file of a shard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str


class Shard(BaseModel):
    """A shard that is complete."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    images: int
    bytes: int
    """Bytes of all images together."""
    files: dict[str, File]
    """Files by their path in the folder; of an image folder, its metadata with all hashes."""
    missing: list[str]
    changed: list[str]


class Manifest(BaseModel):
    """The whole export."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Format
    campaign: str
    storage: str
    imagefleet: str
    shard_size: int
    images: int
    bytes: int
    missing: int
    changed: int
    left_out: int
    """Records that are damaged, or whose image is none of the campaign's."""
    first_missing: list[str]
    first_changed: list[str]
    shards: list[Shard]

    @property
    def is_whole(self) -> bool:
        """Every image that the records promise is there, as it was recorded."""
        return not (self.missing or self.changed or self.left_out)


def of(plan: Plan, shards: Iterable[Shard]) -> Manifest:
    """The manifest of the shards of a plan."""
    done = list(shards)
    missing = [name for shard in done for name in shard.missing]
    changed = [name for shard in done for name in shard.changed]
    return Manifest(
        format=plan.format,
        campaign=plan.campaign,
        storage=plan.storage,
        imagefleet=metadata.version("imagefleet"),
        shard_size=plan.shard_size,
        images=sum(shard.images for shard in done),
        bytes=sum(shard.bytes for shard in done),
        missing=len(missing),
        changed=len(changed),
        left_out=plan.left_out,
        first_missing=missing[:_NAMED],
        first_changed=changed[:_NAMED],
        shards=[each.model_copy(update={"missing": [], "changed": []}) for each in done],
    )


def write(folder: Path, manifest: Manifest) -> None:
    with files.whole(folder / MANIFEST) as draft:
        draft.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest | None:
    """The manifest of a finished export; None if there is none.

    Raises:
        SetupError: it is none of an export, or some of its files are not there any more.
    """
    try:
        found = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise errors.SetupError(
            f"{folder / MANIFEST} is not of this version of imagefleet: choose another folder"
        ) from None
    for shard in found.shards:
        for name, file in shard.files.items():
            if files.size_of(folder / name) != file.bytes:
                raise errors.SetupError(
                    f"{folder / name} is not as {MANIFEST} says: export into another folder"
                )
    return found

"""Plans a scoring run: a campaign's images by group, in chunks that follow from their names."""

import asyncio
import hashlib
import json
import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from evaluation.score import extractors
from evaluation.sweep import manifest
from evaluation.sweep.manifest import Group, Sweep
from imagefleet import errors
from imagefleet.caption import caption_of
from imagefleet.records import reader
from imagefleet.records.catalog import Damaged
from imagefleet.records.record import Record, Spot
from imagefleet.storage.open import Storage

#: Images in a chunk, about; one that is interrupted is scored anew.
CHUNK_IMAGES = 256

#: The group of a campaign that is no sweep.
ALL = "all"

#: The id of a sweep's job: between the group and the caption's number is what no group's name has.
_SWEPT = re.compile(r"(?P<group>[A-Za-z0-9][A-Za-z0-9.-]*)_[0-9]{6,12}")

#: Suffixes of files of pictures.
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})


class ImageRow(NamedTuple):
    """An image: its blob or its path below a folder, its caption, and what its file is."""

    name: str
    caption: str
    size_bytes: int | None
    #: None of an image that a worker found of one that died: its size says what it is.
    sha256: str | None
    pack: str | None = None
    offset: int = 0

    @property
    def spot(self) -> Spot:
        return Spot(self.name, self.pack, self.offset, self.size_bytes or 0)

    def is_of(self, data: bytes) -> bool:
        """True if *data* is that image's file."""
        if self.sha256 is not None:
            return hashlib.sha256(data).hexdigest() == self.sha256
        return self.size_bytes in {None, len(data)}


@dataclass(frozen=True)
class Chunk:
    """Images scored together; *folder* has them where they are no blobs."""

    file: Path
    #: The stem of the files with what was computed.
    features: Path
    folder: Path | None = None

    def rows(self) -> list[ImageRow]:
        """The images by name, so that their order does not depend on that of the records."""
        with self.file.open(encoding="utf-8") as lines:
            return sorted(ImageRow(*json.loads(line)) for line in lines)


@dataclass(frozen=True)
class ScorePlan:
    """The chunks of each group, and what could not be planned."""

    chunks: Mapping[str, Sequence[Chunk]]
    images: Counter[str]
    groups: Mapping[str, Group | None]
    guidance: Mapping[str, float | None]
    damaged: Damaged = field(default_factory=Damaged)
    of_no_group: int = 0


def digest(rows: Sequence[ImageRow]) -> str:
    """Identifies a chunk's images: another digest makes what was computed invalid."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


async def make(
    storage: Storage, campaign: str, work: Path, on_records: Callable[[int], None]
) -> ScorePlan:
    """Plans a campaign from its records, some at a time; raises SetupError without images."""
    swept = await manifest.read(storage, campaign)
    counts = await reader.counts(storage, campaign)
    each = swept.captions.count if swept else counts.images
    damaged = Damaged()
    planner = _Planner(swept, work, _chunks_of(each))
    async for batch in reader.results(storage, campaign, {"completed"}, damaged):
        await asyncio.to_thread(planner.add, batch)
        on_records(len(batch))
    if not planner.images:
        raise errors.SetupError(
            f"campaign {campaign} has no images yet: nothing to score"
        )
    return planner.finish(damaged)


def pictures(folder: Path) -> list[str]:
    """The names of the pictures in a folder and in its subfolders, but for hidden ones."""
    return [
        name.as_posix()
        for name in (path.relative_to(folder) for path in sorted(folder.rglob("*")))
        if name.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in name.parts)
    ]


def of_folder(
    folder: Path, names: Sequence[str], work: Path, on_files: Callable[[int], None]
) -> list[Chunk]:
    """The chunks of pictures in a folder, which are what their bytes are."""
    target = _emptied(work / "plan" / "reference")
    chunks = _chunks_of(len(names))
    rows = defaultdict[int, list[ImageRow]](list)
    for name in names:
        rows[_chunk(name, chunks)].append(
            ImageRow(name, "", None, extractors.sha256_of(folder / name))
        )
        on_files(1)
    for number, some in rows.items():
        _append(target / f"{number:06}.jsonl", some)
    return list(_listed(target, work / "features" / "reference", folder))


class _Planner:
    """Appends images to the files of their chunks."""

    def __init__(self, swept: Sweep | None, work: Path, chunks: int) -> None:
        self.images = Counter[str]()
        self._groups = {each.name: each for each in swept.groups} if swept else None
        self._chunks = chunks
        self._guidance = defaultdict[str, set[float | None]](set)
        self._of_no_group = 0
        self._work = work
        self._target = _emptied(work / "plan" / "groups")

    def add(self, records: Iterable[Record]) -> None:
        rows = defaultdict[Path, list[ImageRow]](list)
        for record in records:
            blob = record.blob or ""
            if record.stage < record.stages:
                continue  # a job's image is that of its last stage
            group = ALL if self._groups is None else group_of(record.id)
            if group is None or not (self._groups is None or group in self._groups):
                self._of_no_group += 1
                continue
            number = _chunk(blob, self._chunks)
            rows[self._target / group / f"{number:06}.jsonl"].append(
                ImageRow(
                    blob,
                    caption_of(record),
                    record.size_bytes,
                    record.sha256,
                    record.pack,
                    record.offset or 0,
                )
            )
            self.images[group] += 1
            if len(self._guidance[group]) < 2:  # noqa: PLR2004 - two are mixed
                self._guidance[group].add(record.cfg_scale)
        for path, some in rows.items():
            _append(path, some)

    def finish(self, damaged: Damaged) -> ScorePlan:
        groups = {ALL: None} if self._groups is None else {**self._groups}
        features = self._work / "features" / "groups"
        return ScorePlan(
            {
                name: list(_listed(self._target / name, features / name))
                for name in groups
            },
            self.images,
            groups,
            {
                name: group.guidance if group else _only(self._guidance[name])
                for name, group in groups.items()
            },
            damaged,
            self._of_no_group,
        )


def group_of(job_id: str) -> str | None:
    """The name of the group that a job's id says; None for a job of no sweep."""
    found = _SWEPT.fullmatch(job_id)
    return found["group"] if found else None


def _only(values: set[float | None]) -> float | None:
    return next(iter(values)) if len(values) == 1 else None


def _chunks_of(images: int) -> int:
    return max(1, math.ceil(images / CHUNK_IMAGES))


def _chunk(name: str, chunks: int) -> int:
    """Number of the chunk an image belongs to.

    It follows from the name alone: neither the records' order nor other images change it.
    """
    return (
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % chunks
    )


def _append(path: Path, rows: Iterable[ImageRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)


def _emptied(folder: Path) -> Path:
    """Planned anew each time: that costs seconds, and the campaign may have grown."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _listed(plan: Path, features: Path, folder: Path | None = None) -> Iterator[Chunk]:
    for path in sorted(plan.glob("*.jsonl")):
        yield Chunk(path, features / path.stem, folder)

"""What goes into which shard, decided once: a resumed export goes on with the same plan.

The records are sorted by the names of their images, so that the shards of a campaign are the same
whoever exports it. They are sorted on the disk: memory is flat.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleet.results import files
from imagefleet import errors
from imagefleet.records.record import Record
from imagefleet.records.stored import Damaged

#: The subfolder of an export until it is done.
WORK = ".export"
_PLAN = "plan.json"
_SORTED = "sorted"

#: Records sorted in memory, some 100 MB.
_CHUNK = 50_000

Format = Literal["webdataset", "parquet", "imagefolder"]


class Plan(BaseModel):
    """An export's parameters, and what its records promise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    campaign: str
    storage: str
    format: Format
    shard_size: Annotated[int, Field(ge=1)]
    images: int
    bytes: int
    left_out: int
    """Records that are damaged, or whose image is none of the campaign's."""

    @property
    def shards(self) -> int:
        return -(-self.images // self.shard_size)


def wanted(campaign: str, form: Format, shard_size: int) -> Plan:
    """A plan that has no numbers yet."""
    return Plan(
        campaign=campaign,
        storage="",
        format=form,
        shard_size=shard_size,
        images=0,
        bytes=0,
        left_out=0,
    )


def read(folder: Path) -> Plan | None:
    """The plan of an unfinished export in *folder*; None if there is none.

    Raises:
        SetupError: it is of another version.
    """
    try:
        return Plan.model_validate_json((folder / WORK / _PLAN).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise errors.SetupError(
            f"{folder / WORK} is not of this version of imagefleet: delete it to begin again"
        ) from None


def check_empty(folder: Path) -> None:
    """Creates the folder; raises SetupError if it has something in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if {each.name for each in folder.iterdir()} - {WORK}:
        raise errors.SetupError(f"{folder} is not empty: choose another folder for the export")


async def make(
    records: AsyncIterator[list[Record]],
    folder: Path,
    plan: Plan,
    damaged: Damaged,
    on_records: Callable[[int], None],
) -> Plan:
    """Writes the plan of an export that has none; *plan* has no numbers yet.

    *damaged* counts what is left out while *records* are read.
    """
    work = folder / WORK
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed before its plan was whole
    (work / _SORTED).mkdir(parents=True)
    names = (work / _SORTED / f"{number}" for number in itertools.count())
    chunk: list[Record] = []
    async for batch in records:
        chunk += batch
        if len(chunk) >= _CHUNK:
            await asyncio.to_thread(_write_sorted, chunk, next(names))
            chunk = []
        on_records(len(batch))
    await asyncio.to_thread(_write_sorted, chunk, next(names))
    images, size = await asyncio.to_thread(_cut, work, plan.shard_size)
    plan = plan.model_copy(update={"images": images, "bytes": size, "left_out": damaged.count})
    shutil.rmtree(work / _SORTED)
    with files.whole(work / _PLAN) as draft:
        draft.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return plan


def records_of(folder: Path, number: int) -> Iterator[Record]:
    """The records of a shard, by the names of their images."""
    with (folder / WORK / f"{number:05}.plan").open("rb") as lines:
        yield from map(Record.read, lines)


def _write_sorted(records: Iterable[Record], path: Path) -> None:
    # A line begins with the name of its image, so lines sort as the names do.
    path.write_bytes(b"".join(sorted(record.line() for record in records)))


def _cut(work: Path, shard_size: int) -> tuple[int, int]:
    """Writes the records of each shard to a file; returns the images and their bytes."""
    images = size = 0
    with contextlib.ExitStack() as stack:
        chunks = [stack.enter_context(each.open("rb")) for each in (work / _SORTED).iterdir()]
        lines = _latest(heapq.merge(*chunks))
        for number in itertools.count():
            shard = list(itertools.islice(lines, shard_size))
            if not shard:
                return images, size
            (work / f"{number:05}.plan").write_bytes(b"".join(shard))
            images += len(shard)
            size += sum(Record.read(line).size_bytes or 0 for line in shard)
    raise AssertionError


def _latest(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The latest line of each image: one that was drawn again has several."""
    for _, each in itertools.groupby(lines, key=_image_of):
        same = list(each)
        yield same[0] if len(same) == 1 else max(same, key=lambda line: Record.read(line).at)


def _image_of(line: bytes) -> bytes:
    # {"outcome":"completed","blob":"NAME",...
    return line.split(b'"', 8)[7]

"""What goes into which shard, decided once, and what was made of it: `manifest.json`.

The records are sorted by the names of their images, so that the shards of a campaign are the same
whoever exports it. SQLite sorts them on the disk: memory is flat.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from fleet.results import files
from imagefleet import errors
from imagefleet.records.record import Record
from imagefleet.records.stored import Damaged

#: The subfolder of an export until it is done.
WORK = ".export"

_TABLES = """
CREATE TABLE IF NOT EXISTS plan(json TEXT);
CREATE TABLE IF NOT EXISTS listed(
    id INTEGER PRIMARY KEY, blob TEXT, at REAL, size INTEGER, line BLOB
);
CREATE TABLE IF NOT EXISTS records(place INTEGER PRIMARY KEY, id INTEGER);
CREATE TABLE IF NOT EXISTS done(shard INTEGER PRIMARY KEY, json TEXT);
"""

#: The latest record of each image: one that was drawn again has several.
_SORT = (
    "INSERT INTO records(id) SELECT id FROM (SELECT id, blob, max(at) FROM listed GROUP BY blob)"
    " ORDER BY blob"
)

Format = Literal["webdataset", "parquet", "imagefolder"]


class Plan(BaseModel, extra="forbid", frozen=True):
    """An export's parameters, and what its records promise."""

    campaign: str
    storage: str = ""
    format: Format
    shard_size: Annotated[int, Field(ge=1)]
    images: int = 0
    bytes: int = 0
    left_out: int = 0
    """Records that are damaged, or whose image is none of the campaign's."""

    @property
    def shard_count(self) -> int:
        return -(-self.images // self.shard_size)


class Work:
    """The database of an export that is not done yet."""

    def __init__(self, file: Path | Literal[""]) -> None:
        """Without a name, SQLite deletes it when it is closed."""
        self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    def plan(self) -> Plan | None:
        """The plan of a run before."""
        found = self._db.execute("SELECT json FROM plan").fetchone()
        return found and Plan.model_validate_json(found[0])

    async def make(
        self,
        records: AsyncIterator[list[Record]],
        plan: Plan,
        damaged: Damaged,
        on_records: Callable[[int], None],
    ) -> Plan:
        """Writes the plan, whole or not at all; *plan* has no numbers yet.

        *damaged* counts what is left out while *records* are read.
        """
        with self._db:  # commits, or rolls back
            self._db.execute("BEGIN")
            async for batch in records:
                await asyncio.to_thread(self._list, batch)
                on_records(len(batch))
            await asyncio.to_thread(self._db.execute, _SORT)
            images, size = self._db.execute(
                "SELECT count(*), coalesce(sum(size), 0) FROM records JOIN listed USING (id)"
            ).fetchone()
            numbers = {"images": images, "bytes": size, "left_out": damaged.count}
            plan = plan.model_copy(update=numbers)
            self._db.execute("INSERT INTO plan VALUES(?)", [plan.model_dump_json()])
        return plan

    def records(self, number: int, shard_size: int) -> Iterator[Record]:
        """The records of a shard, by the names of their images."""
        places = number * shard_size, (number + 1) * shard_size
        query = "SELECT line FROM records JOIN listed USING (id)"
        query += " WHERE place > ? AND place <= ? ORDER BY place"
        for (line,) in self._db.execute(query, places):
            yield Record.read(line)

    def done(self, number: int) -> Shard | None:
        """A shard that is done."""
        found = self._db.execute("SELECT json FROM done WHERE shard = ?", [number]).fetchone()
        return found and Shard.model_validate_json(found[0])

    def note(self, number: int, shard: Shard) -> None:
        row = [number, shard.model_dump_json()]
        self._db.execute("INSERT OR REPLACE INTO done VALUES(?, ?)", row)

    def _list(self, records: Sequence[Record]) -> None:
        rows = ((each.blob, each.at.timestamp(), each.size_bytes, each.line()) for each in records)
        self._db.executemany("INSERT INTO listed(blob, at, size, line) VALUES(?, ?, ?, ?)", rows)


MANIFEST = "manifest.json"

#: Named of the images that are missing or changed; a shard's Parquet file has all of them.
_NAMED = 1_000


class File(BaseModel, extra="forbid", frozen=True):
    """A file of a shard."""

    bytes: int
    sha256: str


class Shard(BaseModel, extra="forbid", frozen=True):
    """A shard that is complete."""

    name: str
    images: int
    bytes: int
    """Bytes of all images together."""
    files: dict[str, File]
    """Files by their path in the folder; of an image folder, its metadata with all hashes."""
    missing: list[str]
    changed: list[str]


class Manifest(Plan):
    """The whole export: what its plan says, with the images that are in it."""

    imagefleet: str
    missing: int
    changed: int
    first_missing: list[str]
    first_changed: list[str]
    shards: list[Shard]

    @classmethod
    def of(cls, plan: Plan, shards: Sequence[Shard]) -> Self:
        """The manifest of the shards of a plan."""
        missing = [name for shard in shards for name in shard.missing]
        changed = [name for shard in shards for name in shard.changed]
        return cls(
            **plan.model_dump(exclude={"images", "bytes"}),
            imagefleet=metadata.version("imagefleet"),
            images=sum(shard.images for shard in shards),
            bytes=sum(shard.bytes for shard in shards),
            missing=len(missing),
            changed=len(changed),
            first_missing=missing[:_NAMED],
            first_changed=changed[:_NAMED],
            shards=[shard.model_copy(update={"missing": [], "changed": []}) for shard in shards],
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """That of a finished export, if there is one; raises SetupError if files are gone."""
        try:
            found = cls.model_validate_json((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            raise errors.SetupError(
                f"{folder / MANIFEST} is no manifest of this version: choose another folder"
            ) from None
        for shard in found.shards:
            for name, file in shard.files.items():
                if files.size_of(folder / name) != file.bytes:
                    raise errors.SetupError(
                        f"{folder / name} is not as {MANIFEST} says: export into another folder"
                    )
        return found

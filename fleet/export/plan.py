"""The plan of an export (which image goes into which shard), and the manifest of what was made.

The records are sorted by the names of their images, so that the shards of a campaign are the same
whoever exports it. SQLite sorts them on the disk: memory is flat.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import (
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field

from cli import files
from cli.console import Move
from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.keeping.rule import Keep
from imagefleet.records.catalog import Damaged
from imagefleet.records.record import Record
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.protocol import BlobRecord
from imagefleet.validation import JSONDict

#: The subfolder of an export until it is done.
WORK_FOLDER = ".export"

#: Records of one image that are tried: one that was drawn again has several.
_MOST_RECORDS = 8

_TABLES = """
CREATE TABLE IF NOT EXISTS plan(json TEXT);
CREATE TABLE IF NOT EXISTS listed(
    blob TEXT, at REAL, sha256 TEXT, line BLOB, pack TEXT, rank REAL
);
CREATE TABLE IF NOT EXISTS stored(blob TEXT PRIMARY KEY, size INTEGER, sha256 TEXT);
CREATE TABLE IF NOT EXISTS images(place INTEGER PRIMARY KEY, blob TEXT UNIQUE, pack TEXT);
CREATE TABLE IF NOT EXISTS done(shard INTEGER PRIMARY KEY, json TEXT);
CREATE TABLE IF NOT EXISTS loras(name TEXT PRIMARY KEY);
"""

#: An image that is in several places is looked for; the others in packs come last, pack by pack.
_IMAGES = """
INSERT INTO images(blob, pack) SELECT
    blob, iif(count(DISTINCT coalesce(pack, '')) = 1, max(pack), NULL) AS only
FROM listed GROUP BY blob ORDER BY only IS NOT NULL, only, min(rank), blob
"""

_SORT = (
    "CREATE INDEX by_image ON listed(blob)",
    _IMAGES,
    "CREATE INDEX by_pack ON images(pack)",
)

#: What fits comes first, then the latest: nobody pushes it out with records of his own.
_RECORDS = """
SELECT place, line FROM (
    SELECT place, line, row_number() OVER (
        PARTITION BY place ORDER BY listed.sha256 IS stored.sha256 DESC, at DESC
    ) AS rank
    FROM images JOIN listed USING (blob) LEFT JOIN stored USING (blob)
    WHERE place > ? AND place <= ? AND images.pack IS NULL
) WHERE rank <= ? ORDER BY place, rank
"""


class ExportPlan(BaseModel, extra="forbid", frozen=True):
    """An export's parameters, and what its records promise."""

    campaign: str
    storage: str = ""
    shard_size: Annotated[int, Field(ge=1)]
    #: The rule by which images are chosen and sorted; None: all, by their names.
    keep: Keep | None = None
    #: True if pictures get Content Credentials: then packs are not copied.
    has_credentials: bool = False
    images: int = 0
    #: Images that are there under their names: records may tell of others.
    stored: int = 0
    bytes: int = 0
    #: Records that are of no picture of the campaign, as far as they were looked at.
    misfits: int = 0
    #: Images that are copied with their packs.
    packed: int = 0
    packs: int = 0

    @property
    def shard_count(self) -> int:
        return -(-(self.images - self.packed) // self.shard_size) + self.packs


class PlanDatabase:
    """The database of an export that is not done yet."""

    def __init__(self, file: Path | Literal[""]) -> None:
        """Opens the database *file*; one without a name is deleted by SQLite when it is closed."""
        self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._db.executescript(_TABLES)
        self._execute = self._db.execute

    def close(self) -> None:
        self._db.close()

    def plan(self) -> ExportPlan | None:
        found = self._execute("SELECT json FROM plan").fetchone()
        return found and ExportPlan.model_validate_json(found[0])

    async def make(
        self,
        records: AsyncIterator[list[Record]],
        stored: Iterable[AsyncIterator[BlobRecord]],
        plan: ExportPlan,
        damaged: Damaged,
        on_records: Move,
    ) -> ExportPlan:
        """Writes the plan, whole or not at all; *plan* has no numbers yet.

        *damaged* counts what does not fit while *records* are read.
        """
        with self._db:  # commits, or rolls back
            self._execute("BEGIN")
            async for batch in records:
                await asyncio.to_thread(self._list, batch, plan.keep)
                on_records(len(batch))
            # Records are untrusted: what an image takes is what the storage says.
            for listing in stored:
                async for blob in listing:
                    self._execute(
                        "INSERT OR REPLACE INTO stored VALUES(?, ?, ?)",
                        [blob.name, blob.size_bytes, blob.metadata.get("sha256")],
                    )
            for statement in _SORT:
                await asyncio.to_thread(self._execute, statement)
            images, found, size = self._execute(
                "SELECT (SELECT count(*) FROM images), count(size), coalesce(sum(size), 0)"
                " FROM (SELECT DISTINCT coalesce(pack, blob) AS blob FROM images)"
                " JOIN stored USING (blob)"
            ).fetchone()
            if plan.has_credentials:
                self._execute("UPDATE images SET pack = NULL")
            packed, packs = self._execute(
                "SELECT count(pack), count(DISTINCT pack) FROM images"
            ).fetchone()
            plan = plan.model_copy(
                update={
                    "images": images,
                    "stored": found,
                    "bytes": size,
                    "packed": packed,
                    "packs": packs,
                    "misfits": damaged.count,
                }
            )
            self._execute("INSERT INTO plan VALUES(?)", [plan.model_dump_json()])
        return plan

    def records(self, number: int, shard_size: int) -> Iterator[list[Record]]:
        """The records of each image of a shard, by the images' names."""
        places = number * shard_size, (number + 1) * shard_size
        found = self._execute(_RECORDS, [*places, _MOST_RECORDS])
        for _, rows in itertools.groupby(found, key=lambda row: row[0]):
            yield [Record.read(line) for _, line in rows]

    def packs(self) -> Iterator[list[Record]]:
        """The records of the images of each pack that is copied, by the packs' names."""
        for (name,) in self._execute(
            "SELECT DISTINCT pack FROM images ORDER BY pack"
        ).fetchall():
            rows = self._execute(
                "SELECT line FROM images JOIN listed USING (blob) WHERE images.pack = ?",
                [name],
            ).fetchall()
            if rows:  # none of images that are in no pack
                yield [Record.read(line) for (line,) in rows]

    def done(self, number: int) -> Shard | None:
        found = self._execute(
            "SELECT json FROM done WHERE shard = ?", [number]
        ).fetchone()
        return found and Shard.model_validate_json(found[0])

    def note(self, number: int, shard: Shard) -> None:
        self._execute(
            "INSERT OR REPLACE INTO done VALUES(?, ?)",
            [number, shard.model_dump_json()],
        )

    def _list(self, records: Sequence[Record], rule: Keep | None) -> None:
        rows = (
            (
                each.blob,
                each.at.timestamp(),
                each.sha256,
                each.line(),
                each.pack,
                0.0 if rule is None else rule.rank(each.scores),
            )
            for each in records
        )
        self._db.executemany("INSERT INTO listed VALUES(?, ?, ?, ?, ?, ?)", rows)
        self._db.executemany(
            "INSERT OR IGNORE INTO loras VALUES(?)",
            {(lora.name,) for each in records for lora in each.loras},
        )

    def loras(self) -> set[str]:
        """Names of LoRAs, as the records tell them."""
        return {name for (name,) in self._execute("SELECT name FROM loras")}


MANIFEST = "manifest.json"

#: The purpose of a manifest's signature.
_OF_EXPORTS = "export"

#: Images that the manifest names of those that are missing or changed.
_NAMED = 1_000


class Shard(BaseModel, extra="forbid", frozen=True):
    """A finished shard: its file by the path in the folder, and what is in it."""

    file: str
    file_bytes: int
    sha256: str
    images: int
    bytes: int
    missing: list[str]
    changed: list[str]
    #: Records that are of no picture that is stored.
    misfits: int

    def is_in(self, folder: Path) -> bool:
        return files.size_of(folder / self.file) == self.file_bytes


class Signature(BaseModel, extra="forbid", frozen=True):
    """An Ed25519 signature, and the public key that it is said to be of."""

    key: str
    ed25519: str


class Manifest(ExportPlan):
    """The whole export: what its plan says, with the images that are in it."""

    imagefleet: str
    missing: int
    changed: int
    first_missing: list[str]
    first_changed: list[str]
    #: The hash that the storage has of each LoRA that the images were drawn with.
    loras: dict[str, str]
    shards: list[Shard]
    signature: Signature | None = None

    @classmethod
    def of(
        cls,
        plan: ExportPlan,
        shards: Sequence[Shard],
        loras: Mapping[str, str],
        key: SigningKey | None = None,
    ) -> Self:
        """The manifest of these *shards*, signed with *key*."""
        missing = [name for shard in shards for name in shard.missing]
        changed = [name for shard in shards for name in shard.changed]
        made = cls(
            **plan.model_dump(exclude={"images", "bytes", "misfits"}),
            imagefleet=metadata.version("imagefleet"),
            images=sum(shard.images for shard in shards),
            bytes=sum(shard.bytes for shard in shards),
            missing=len(missing),
            changed=len(changed),
            misfits=plan.misfits + sum(shard.misfits for shard in shards),
            first_missing=missing[:_NAMED],
            first_changed=changed[:_NAMED],
            loras=dict(loras),
            shards=[
                shard.model_copy(update={"missing": [], "changed": []})
                for shard in shards
            ],
        )
        if key is None:
            return made
        signature = Signature(
            key=key.public, ed25519=key.sign(_OF_EXPORTS, made._signed)
        )
        return made.model_copy(update={"signature": signature})

    @property
    def _signed(self) -> JSONDict:
        return self.model_dump(mode="json", exclude={"signature"})

    def is_signed_with(self, keys: TrustedKeys) -> bool:
        return self.signature is not None and keys.accept(
            _OF_EXPORTS, self._signed, self.signature.ed25519
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest of a finished export, if any; raises SetupError if files are gone."""
        found = validation.read_file(
            cls,
            folder / MANIFEST,
            "is no manifest of this version: choose another folder",
        )
        for shard in found.shards if found else []:
            if not shard.is_in(folder):
                raise SetupError(
                    f"{folder / shard.file} is not as {MANIFEST} says: export into another folder"
                )
        return found

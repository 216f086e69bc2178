"""An index of a campaign's records in a SQLite file of the cache, so that memory stays flat.

It has a row for each image and for each job that ended without; all of it is read again from the
records where it is missing. The texts in it are untrusted, as the records are.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fleet.gallery import cache
from imagefleet.records.record import Record

Tab = Literal["images", "failed", "cancelled"]
Facet = Literal["lora", "worker"]

#: Outcomes by a row's `outcome`: those of the tabs, and what an operator has settled since.
_OUTCOMES = ("completed", "failed", "cancelled", "replayed", "discarded")
_OF_TAB: Mapping[Tab, int] = {"images": 0, "failed": 1, "cancelled": 2}
_SETTLED = 3

#: Stands in the place of an outcome for jobs of which every image is stored.
_COMPLETED_JOBS = "completed job"

#: Rows of a result that are in memory as Python objects.
_FETCHED = 10_000

#: The most characters of a failed job's reason; the record has the rest.
_REASON_CHARACTERS = 500

#: Rows whose records are compressed as one: that is quicker, and a third of the size.
_BLOCK = 50

#: Raised with the tables: an index of another version is made again.
_VERSION = 3

_TABLES = """
CREATE TABLE IF NOT EXISTS rows(
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, outcome INTEGER NOT NULL, at REAL NOT NULL,
    worker INTEGER NOT NULL, job TEXT NOT NULL, prompt TEXT NOT NULL, reason TEXT
);
CREATE INDEX IF NOT EXISTS ended ON rows(outcome, seq) WHERE outcome > 0;
CREATE TABLE IF NOT EXISTS details(first INTEGER PRIMARY KEY, records BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS names(
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, count INTEGER NOT NULL,
    UNIQUE(kind, name)
);
CREATE TABLE IF NOT EXISTS loras(lora INTEGER, seq INTEGER, PRIMARY KEY(lora, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT OR IGNORE INTO facts VALUES('birth', hex(randomblob(6)));
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects rows of one tab; every word of *text* is in the prompt, the reason or the id."""

    tab: Tab = "images"
    text: str = ""
    lora: str = ""
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """The rows of each tab, and the jobs that have ended in one of them."""

    tabs: dict[Tab, int]
    jobs: int


@dataclass(frozen=True, slots=True)
class Row:
    """What the page shows of a row before it is opened."""

    seq: int
    job: str
    prompt: str
    reason: str | None


class Index:
    """The rows of one campaign. Its calls block: they are for threads; one at a time may add."""

    def __init__(self, path: Path) -> None:
        """Raises SetupError if the file cannot be written."""
        self._path = path
        self._writing = threading.Lock()
        self._writer = cache.opened(path, _TABLES, _VERSION)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(cache.connect(self._path)) as db:
            yield db

    def close(self) -> None:
        with self._writing:  # a thread whose caller was cancelled goes on
            self._writer.close()

    def clear(self) -> None:
        """Forgets everything: the campaign's records are others than they were."""
        tables = ("rows", "details", "names", "loras", "facts")
        dropped = " ".join(f"DROP TABLE {each};" for each in tables)
        with self._writing:
            self._writer.executescript(f"BEGIN IMMEDIATE; {dropped} {_TABLES} COMMIT;")

    def position(self) -> dict[str, int]:
        """The position at which the follower goes on."""
        with self._reading() as db:
            found = db.execute("SELECT value FROM facts WHERE name = 'position'").fetchone()
        return dict(json.loads(found[0])) if found else {}

    def add(self, records: Iterable[Record], position: Mapping[str, int]) -> None:
        """Adds what is new of the records, and notes where the next ones are."""
        with self._writing, self._transaction() as db:
            _Addition(db).add(records)
            db.execute(
                "INSERT OR REPLACE INTO facts VALUES('position', ?)", [json.dumps(dict(position))]
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
        except BaseException:
            self._writer.execute("ROLLBACK")
            raise
        self._writer.execute("COMMIT")

    def birth(self) -> str:
        """Differs after the rows were numbered anew."""
        with self._reading() as db:
            return str(db.execute("SELECT value FROM facts WHERE name = 'birth'").fetchone()[0])

    def counts(self) -> Counts:
        """The rows of each tab, and the jobs that have ended."""
        with self._reading() as db:
            found = db.execute("SELECT name, count FROM names WHERE kind = 'outcome'")
            by_outcome = dict(found.fetchall())
        tabs = {tab: by_outcome.get(_OUTCOMES[code], 0) for tab, code in _OF_TAB.items()}
        stored = by_outcome.get(_COMPLETED_JOBS, 0)
        return Counts(tabs, stored + tabs["failed"] + tabs["cancelled"])

    def names(self, kind: Facet, limit: int) -> list[tuple[str, int]]:
        """The most frequent LoRAs or workers, each with its images."""
        with self._reading() as db:
            return db.execute(
                "SELECT name, count FROM names WHERE kind = ? AND count > 0"
                " ORDER BY count DESC, name LIMIT ?",
                [kind, limit],
            ).fetchall()

    def last(self) -> int:
        """The number of the newest row."""
        with self._reading() as db:
            return int(db.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0])

    def select(self, chosen: Filter, after: int, last: int) -> np.ndarray:
        """The rows of a filter beyond *after* and up to *last*, the oldest first; 4 bytes each."""
        where, values = _condition(chosen)
        seqs, times = array("I"), array("d")
        with self._reading() as db:
            found = db.execute(
                f"SELECT seq, at FROM rows WHERE {where} AND seq > ? AND seq <= ?",  # noqa: S608
                [*values, after, last],
            )
            while some := found.fetchmany(_FETCHED):
                seqs.extend(each[0] for each in some)
                times.extend(each[1] for each in some)
        if not seqs:
            return np.zeros(0, np.uint32)
        return np.frombuffer(seqs, np.uint32)[np.argsort(np.frombuffer(times), kind="stable")]

    def rows(self, seqs: Sequence[int]) -> list[Row]:
        """The rows of these numbers, in this order; those that are gone are left out."""
        marks = ",".join("?" * len(seqs))
        with self._reading() as db:
            found = db.execute(
                f"SELECT seq, job, prompt, reason FROM rows WHERE seq IN ({marks})",  # noqa: S608
                seqs,
            )
            rows = {each[0]: Row(*each) for each in found}
        return [rows[seq] for seq in seqs if seq in rows]

    def record(self, seq: int) -> Record | None:
        """A row's whole record; None if there is no such row."""
        with self._reading() as db:
            found = db.execute(
                "SELECT prompt, first, records FROM rows, details"
                " WHERE seq = ? AND first <= seq ORDER BY first DESC LIMIT 1",
                [seq],
            ).fetchone()
        if found is None:
            return None
        prompt, first, block = found
        record = Record.read(zlib.decompress(block).split(b"\n")[seq - first])
        return record.model_copy(update={"prompt": prompt}) if prompt else record


class _Addition:
    """Adds records within one transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._ids: dict[tuple[str, str], int] = {}
        self._counts = Counter[int]()
        self._first = 0
        self._block: list[bytes] = []

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.outcome == "completed":
                self._add_image(record)
            else:
                self._add_ended(record)
        self._end_block()
        self._db.executemany(
            "UPDATE names SET count = count + ? WHERE id = ?",
            [(count, each) for each, count in self._counts.items()],
        )

    def _add_image(self, record: Record) -> None:
        # Whose name was taken comes twice.
        if (seq := self._insert(f"i{record.blob}", record)) is None:
            return
        for lora in {each.name for each in record.loras}:
            self._db.execute("INSERT INTO loras VALUES(?, ?)", [self._id("lora", lora), seq])
            self._counts[self._id("lora", lora)] += 1
        self._counts[self._id("worker", record.worker)] += 1
        self._counts[self._id("outcome", _COMPLETED_JOBS)] += record.completes_job

    def _add_ended(self, record: Record) -> None:
        """A job that failed or was cancelled, or that an operator has settled: in any order."""
        # The message tells two failures of one job apart, as in `imagefleet.records.reader.ended`.
        key = f"e{record.source or record.key}"
        if self._insert(key, record) is not None or _code(record) < _SETTLED:
            return
        seq, before = self._db.execute(
            "SELECT seq, outcome FROM rows WHERE key = ?", [key]
        ).fetchone()
        self._db.execute("UPDATE rows SET outcome = ? WHERE seq = ?", [_code(record), seq])
        self._counts[self._id("outcome", _OUTCOMES[before])] -= 1
        self._counts[self._id("outcome", record.outcome)] += 1

    def _insert(self, key: str, record: Record) -> int | None:
        """The new row's number; None if there is one of the same key."""
        reason = None
        if record.error or record.reason:
            reason = f"{record.error or ''}: {record.reason or ''}".strip(": ")
        inserted = self._db.execute(
            "INSERT INTO rows(key, outcome, at, worker, job, prompt, reason)"
            " VALUES(?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                key,
                _code(record),
                record.at.timestamp(),
                self._id("worker", record.worker),
                record.id,
                record.prompt or "",
                reason and reason[:_REASON_CHARACTERS],
            ),
        )
        if not inserted.rowcount:
            return None
        self._first = self._first or int(inserted.lastrowid or 0)
        self._block.append(
            record.model_dump_json(exclude_defaults=True, exclude={"prompt"}).encode()
        )
        if len(self._block) == _BLOCK:
            self._end_block()
        self._counts[self._id("outcome", record.outcome)] += 1
        return inserted.lastrowid

    def _end_block(self) -> None:
        """Stores the records of the rows since the last block: their numbers have no gap."""
        if self._block:
            block = zlib.compress(b"\n".join(self._block), 1)
            self._db.execute("INSERT INTO details VALUES(?, ?)", (self._first, block))
        self._first, self._block = 0, []

    def _id(self, kind: str, name: str) -> int:
        known = self._ids.get((kind, name))
        if known is None:
            self._db.execute(
                "INSERT INTO names(kind, name, count) VALUES(?, ?, 0) ON CONFLICT DO NOTHING",
                [kind, name],
            )
            (known,) = self._db.execute(
                "SELECT id FROM names WHERE kind = ? AND name = ?", [kind, name]
            ).fetchone()
            self._ids[kind, name] = known
        return int(known)


def _code(record: Record) -> int:
    return _OUTCOMES.index(record.outcome)


def _condition(chosen: Filter) -> tuple[str, list[str | int]]:
    where, values = ["outcome = ?"], list[str | int]([_OF_TAB[chosen.tab]])
    for word in chosen.text.split():
        # SQLite knows the small and capital letters of ASCII only.
        forms = [word] if word.isascii() else [word, word.lower(), word.upper(), word.capitalize()]
        some = []
        for form in dict.fromkeys(forms):
            pattern = "".join(f"\\{each}" if each in "\\%_" else each for each in form)
            for column in ("prompt", "reason", "job"):
                some.append(f"{column} LIKE ? ESCAPE '\\'")
                values.append(f"%{pattern}%")
        where.append(f"({' OR '.join(some)})")
    if chosen.worker:
        where.append("worker = (SELECT id FROM names WHERE kind = 'worker' AND name = ?)")
        values.append(chosen.worker)
    if chosen.lora:
        where.append(
            "seq IN (SELECT seq FROM loras WHERE lora ="
            " (SELECT id FROM names WHERE kind = 'lora' AND name = ?))"
        )
        values.append(chosen.lora)
    return " AND ".join(where), values

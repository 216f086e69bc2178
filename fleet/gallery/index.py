"""An index of a campaign's records in a temporary SQLite file, so that memory stays flat.

It has a row for each image and for each job that ended without one. Its texts are untrusted, as the
records are.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from imagefleet.records.record import Record

Tab = Literal["images", "failed", "cancelled"]
Facet = Literal["lora", "worker"]

_OUTCOMES: Mapping[Tab, str] = {"images": "completed", "failed": "failed", "cancelled": "cancelled"}

#: Outcomes by which an operator has settled a failed job.
_SETTLED = frozenset({"replayed", "discarded"})

#: The most characters of a row's texts; the record has the rest.
_SHOWN_CHARACTERS = 500

#: Rows of a result that are in memory as Python objects.
_FETCHED = 10_000

_TABLES = """
PRAGMA synchronous = off;
CREATE TABLE rows(
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, outcome TEXT NOT NULL, place REAL NOT NULL,
    worker TEXT NOT NULL, loras TEXT NOT NULL, job TEXT NOT NULL, prompt TEXT NOT NULL, reason TEXT
);
CREATE INDEX places ON rows(outcome, place);
CREATE TABLE records(seq INTEGER PRIMARY KEY, record BLOB NOT NULL);
"""


class Filter(NamedTuple):
    """Selects rows of one tab; every word of *text* is in the prompt, the reason or the id."""

    tab: Tab = "images"
    text: str = ""
    lora: str = ""
    worker: str = ""


class Row(NamedTuple):
    """What the page shows of a row before it is opened."""

    seq: int
    job: str
    prompt: str
    reason: str | None


class Index:
    """The rows of one campaign. Its calls block, and take turns: they are for threads."""

    def __init__(self) -> None:
        self.birth = secrets.token_hex(6)
        """Tells the numbers of its rows from those of another index."""
        self._lock = threading.Lock()
        # SQLite deletes a file without a name when it is closed, however the process ends.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.executescript(_TABLES)
        self._latest = 0.0
        self._counts = Counter[tuple[str, str]]()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, records: Iterable[Record], *, at_end: bool = False) -> None:
        """Adds what is new, by its time or after all others; all or none, or sqlite3.Error."""
        counts = Counter[tuple[str, str]]()
        with self._lock:
            with self._db:  # commits, or rolls back
                self._db.execute("BEGIN")
                for record in sorted(records, key=lambda record: record.at):
                    self._add(record, counts, at_end=at_end)
            self._counts.update(counts)

    def _add(self, record: Record, counts: Counter[tuple[str, str]], *, at_end: bool) -> None:
        is_image = record.outcome == "completed"
        # An image whose name was taken comes twice. The message tells two failures of a job apart.
        key = f"i{record.blob}" if is_image else f"e{record.source or record.key}"
        place = max(record.at.timestamp(), self._latest if at_end else 0.0)
        loras = {lora.name for lora in record.loras} if is_image else set()
        reason = f"{record.error or ''}: {record.reason or ''}".strip(": ")[:_SHOWN_CHARACTERS]
        inserted = self._db.execute(
            "INSERT INTO rows(key, outcome, place, worker, loras, job, prompt, reason)"
            " VALUES(?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                *(key, record.outcome, place, record.worker),
                "".join(f"\n{name}\n" for name in loras),
                *(record.id, record.prompt or "", reason or None),
            ),
        )
        if inserted.rowcount:
            self._latest = max(self._latest, place)
            packed = zlib.compress(record.line(), 1)
            self._db.execute("INSERT INTO records VALUES(?, ?)", (inserted.lastrowid, packed))
            counts["outcome", record.outcome] += 1
            if is_image:
                counts["job", ""] += record.completes_job
                counts["worker", record.worker] += 1
                counts.update(("lora", name) for name in loras)
        elif record.outcome in _SETTLED:
            found = self._db.execute("SELECT outcome FROM rows WHERE key = ?", [key]).fetchone()
            self._db.execute("UPDATE rows SET outcome = ? WHERE key = ?", [record.outcome, key])
            counts["outcome", found[0]] -= 1
            counts["outcome", record.outcome] += 1

    def counts(self) -> tuple[dict[Tab, int], int]:
        """The rows of each tab, and the jobs that have ended."""
        tabs = {tab: self._counts["outcome", outcome] for tab, outcome in _OUTCOMES.items()}
        return tabs, self._counts["job", ""] + tabs["failed"] + tabs["cancelled"]

    def names(self, kind: Facet, limit: int) -> list[tuple[str, int]]:
        """The most frequent LoRAs or workers, each with its images."""
        with self._lock:
            found = [(name, n) for (of, name), n in self._counts.items() if of == kind]
        return sorted(found, key=lambda each: (-each[1], each[0]))[:limit]

    def select(self, chosen: Filter) -> np.ndarray:
        """The rows of a filter, the oldest first; 4 bytes each."""
        where, values = _condition(chosen)
        seqs = array("I")
        with self._lock:
            found = self._db.execute(
                f"SELECT seq FROM rows WHERE {where} ORDER BY place, seq",  # noqa: S608
                values,
            )
            while some := found.fetchmany(_FETCHED):
                seqs.extend(seq for (seq,) in some)
        return np.array(seqs, np.uint32)

    def rows(self, seqs: Sequence[int]) -> list[Row]:
        """The rows of these numbers, in this order."""
        marks = ",".join("?" * len(seqs))
        with self._lock:
            found = self._db.execute(
                f"SELECT seq, job, prompt, reason FROM rows WHERE seq IN ({marks})",  # noqa: S608
                seqs,
            ).fetchall()
        rows = {seq: Row(seq, *more) for seq, *more in found}
        return [rows[seq] for seq in seqs]

    def record(self, seq: int) -> Record | None:
        """A row's whole record; None if there is no such row."""
        with self._lock:
            found = self._db.execute("SELECT record FROM records WHERE seq = ?", [seq]).fetchone()
        return Record.read(zlib.decompress(found[0])) if found else None


def _condition(chosen: Filter) -> tuple[str, list[str]]:
    where, values = ["outcome = ?"], [_OUTCOMES[chosen.tab]]
    for word in chosen.text.split():
        # SQLite knows the small and capital letters of ASCII only.
        forms = [word] if word.isascii() else [word, word.lower(), word.upper(), word.capitalize()]
        some = []
        for form in dict.fromkeys(forms):
            pattern = "".join(f"\\{sign}" if sign in "\\%_" else sign for sign in form)
            for column in ("prompt", "reason", "job"):
                some.append(f"{column} LIKE ? ESCAPE '\\'")
                values.append(f"%{pattern}%")
        where.append(f"({' OR '.join(some)})")
    if chosen.worker:
        where.append("worker = ?")
        values.append(chosen.worker)
    if chosen.lora:
        where.append("instr(loras, ?)")
        values.append(f"\n{chosen.lora}\n")
    return " AND ".join(where), values

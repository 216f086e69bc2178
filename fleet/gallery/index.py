"""An index of a campaign's records in a temporary SQLite file, so that memory stays flat.

It has a row for each image and for each job that ended without one. Its texts are untrusted, as the
records are.
"""

import json
import secrets
import sqlite3
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, StringConstraints, field_validator

from imagefleet.keeping.rule import Keep
from imagefleet.records.record import Record

Tab = Literal["images", "failed", "cancelled", "dropped"]

_OUTCOMES: Mapping[Tab, str] = {
    "images": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "dropped": "dropped",
}

#: Outcomes by which an operator has settled a failed job.
_SETTLED = frozenset({"replayed", "discarded"})

#: LoRAs and workers to choose from, the most frequent.
_MOST_NAMES = 1_000

_TABLES = """
PRAGMA synchronous = off;
CREATE TABLE rows(
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, outcome TEXT NOT NULL, place REAL NOT NULL,
    worker TEXT NOT NULL, loras TEXT NOT NULL, text TEXT NOT NULL, scores TEXT NOT NULL
);
CREATE INDEX places ON rows(outcome, place);
CREATE TABLE records(seq INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX by_row ON records(seq);
"""

#: Records of one image that are kept: it was drawn twice, or somebody says so.
_MOST_RECORDS = 16

_Text = Annotated[str, StringConstraints(max_length=500)]


#: A score by its name, which has no quotes.
_SCORE = """json_extract(scores, '$."{}"')"""

#: How often there is a name of a kind.
_Counts = Counter[tuple[str, str]]


class Filter(BaseModel, frozen=True):
    """Selects rows of one tab; every word of *text* is in the prompt, the reason or the id.

    *keep* is a rule as text (`imagefleet.keeping.rule`): rows that it keeps, the best last.
    """

    tab: Tab = "images"
    text: _Text = ""
    lora: _Text = ""
    worker: _Text = ""
    keep: _Text = ""

    @field_validator("keep")
    @classmethod
    def _is_rule(cls, text: str) -> str:
        if text:
            Keep.model_validate(text)
        return text


def reason(record: Record) -> str:
    """The error and reason that ended a job without an image; empty if it has one."""
    return f"{record.error or ''}: {record.reason or ''}".strip(": ")


class Index:
    """The rows of one campaign. Its calls block, and take turns: they are for threads."""

    def __init__(self) -> None:
        #: Tells the numbers of its rows from those of another index.
        self.birth = secrets.token_hex(6)
        self._lock = threading.Lock()
        # SQLite deletes a file without a name when it is closed, however the process ends.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.executescript(_TABLES)
        self._latest = 0.0
        self._counts = _Counts()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, records: Iterable[Record], *, at_end: bool = False) -> None:
        """Adds what is new, by its time or after all others; all or none, or sqlite3.Error."""
        counts = _Counts()
        with self._lock:
            with self._db:  # commits, or rolls back
                self._db.execute("BEGIN")
                for record in sorted(records, key=lambda record: record.at):
                    self._add(record, counts, at_end=at_end)
            self._counts.update(counts)

    def _add(self, record: Record, counts: _Counts, *, at_end: bool) -> None:
        is_image = record.outcome == "completed"
        # An image may have several records. The message tells two failures of a job apart.
        key = f"i{record.blob}" if is_image else f"e{record.source or record.key}"
        place = max(record.at.timestamp(), self._latest if at_end else 0.0)
        loras = {lora.name for lora in record.loras} if is_image else set()
        text = f"{record.prompt or ''}\n{reason(record)}\n{record.id}".casefold()
        inserted = self._db.execute(
            "INSERT INTO rows(key, outcome, place, worker, loras, text, scores)"
            " VALUES(?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                key,
                record.outcome,
                place,
                record.worker,
                "".join(f"\n{name}\n" for name in loras),
                text,
                json.dumps(record.scores),
            ),
        )
        if inserted.rowcount:
            self._latest = max(self._latest, place)
            self._keep(inserted.lastrowid, record)
            counts["outcome", record.outcome] += 1
            if is_image:
                counts["job", ""] += record.completes_job
                counts["worker", record.worker] += 1
                counts.update(("lora", name) for name in loras)
            return
        find = "SELECT seq, outcome, (SELECT count(*) FROM records WHERE records.seq = rows.seq)"
        seq, outcome, kept = self._db.execute(
            f"{find} FROM rows WHERE key = ?", [key]
        ).fetchone()
        if is_image and kept < _MOST_RECORDS:
            self._keep(seq, record)
        elif record.outcome in _SETTLED:
            self._db.execute(
                "UPDATE rows SET outcome = ? WHERE key = ?", [record.outcome, key]
            )
            counts["outcome", outcome] -= 1
            counts["outcome", record.outcome] += 1

    def _keep(self, seq: int | None, record: Record) -> None:
        packed = zlib.compress(record.line(), 1)
        self._db.execute("INSERT INTO records VALUES(?, ?)", (seq, packed))

    def counts(self) -> tuple[dict[Tab, int], int]:
        """The rows of each tab, and the jobs that have ended."""
        tabs = {
            tab: self._counts["outcome", outcome] for tab, outcome in _OUTCOMES.items()
        }
        without_image = sum(tabs.values()) - tabs["images"]
        return tabs, self._counts["job", ""] + without_image

    def names(self, kind: Literal["lora", "worker"]) -> list[tuple[str, int]]:
        """The most frequent LoRAs or workers, each with its images."""
        with self._lock:
            counts = dict(self._counts)
        found = [(name, count) for (of, name), count in counts.items() if of == kind]
        return sorted(found, key=lambda each: (-each[1], each[0]))[:_MOST_NAMES]

    def select(self, chosen: Filter) -> np.ndarray:
        """The rows of a filter, the oldest first; 4 bytes each."""
        conditions: list[tuple[str, object]] = [
            ("outcome = ?", _OUTCOMES[chosen.tab]),
            *(("instr(text, ?)", word) for word in chosen.text.casefold().split()),
        ]
        if chosen.worker:
            conditions.append(("worker = ?", chosen.worker))
        if chosen.lora:
            conditions.append(("instr(loras, ?)", f"\n{chosen.lora}\n"))
        order = "place"
        if chosen.keep:
            rule = Keep.model_validate(chosen.keep)
            for name, least in rule.minimum.items():
                conditions.append((f"{_SCORE.format(name)} >= ?", least))
            order = f"{_SCORE.format(rule.ranking)}, place"
        where = " AND ".join(condition for condition, _ in conditions)
        query = f"SELECT seq FROM rows WHERE {where} ORDER BY {order}, seq"  # noqa: S608
        with self._lock:
            found = self._db.execute(query, [value for _, value in conditions])
            return np.fromiter((seq for (seq,) in found), np.uint32)

    def records(self, seqs: Sequence[int]) -> dict[int, list[Record]]:
        """The whole records of these rows, in this order; an image may have several."""
        marks = ",".join("?" * len(seqs))
        query = f"SELECT seq, record FROM records WHERE seq IN ({marks})"  # noqa: S608
        found: dict[int, list[Record]] = {seq: [] for seq in seqs}
        with self._lock:
            for seq, packed in self._db.execute(query, seqs).fetchall():
                found[seq].append(Record.read(zlib.decompress(packed)))
        return {seq: records for seq, records in found.items() if records}

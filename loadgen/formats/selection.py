"""Which entries of a file are loaded, and in which order: `--unique` and `--balance`."""

import contextlib
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from imagefleet.job import message
from imagefleet.records.ledger import HASH_BYTES, Digests
from loadgen.formats.lines import ChangedFormat, Entry, FormatError


class Unique(ChangedFormat):
    """Each prompt once, as its first entry has it; some 20 bytes of memory for a prompt.

    Two are the same if they differ in white space alone.
    """

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        known = Digests()
        for entry in self.form.entries(stream):
            prompt = message.fields_if_any(entry.text).get("prompt")
            if not isinstance(prompt, str):
                yield entry
                continue
            text = " ".join(prompt.split()).encode(errors="surrogatepass")
            hashed = hashlib.blake2b(text, digest_size=2 * HASH_BYTES).digest()
            if known.get(hashed[:HASH_BYTES]) == hashed[HASH_BYTES:]:
                yield Entry(entry.place, is_repeat=True)
            else:
                known.put(hashed)
                yield entry


@dataclass
class Balanced(ChangedFormat):
    """The values of a column in turns: one entry of each, then a second of each, and so on.

    Entries without a value have their turns as well. They are sorted on the disk.
    """

    #: A field of a job, or `metadata.NAME`.
    column: str

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        """Raises FormatError if no entry has the column."""
        turns = Counter[str]()
        # One without a name is deleted by SQLite when it is closed.
        with contextlib.closing(sqlite3.connect("")) as database:
            database.execute("CREATE TABLE entries(turn INTEGER, json TEXT)")
            for entry in self.form.entries(stream):
                value = self._value(entry)
                row = turns[value], json.dumps(entry)
                database.execute("INSERT INTO entries VALUES(?, ?)", row)
                turns[value] += 1
            if turns and turns.keys() == {""}:
                raise FormatError(f"no {self.unit} has the column {self.column!r}")
            for (text,) in database.execute(
                "SELECT json FROM entries ORDER BY turn, rowid"
            ):
                yield Entry(*json.loads(text))

    def _value(self, entry: Entry) -> str:
        """The value of the column, as JSON; empty if there is none."""
        found: object = message.fields_if_any(entry.text)
        for name in self.column.split(".", 1):
            found = found.get(name) if isinstance(found, dict) else None
        return "" if found is None else json.dumps(found, sort_keys=True)

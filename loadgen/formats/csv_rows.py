"""CSV: the first row has the names of job fields; separated by commas, semicolons or tabs."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from loadgen.formats.columns import Columns, is_known
from loadgen.formats.entry import Entry, FormatError, lines

#: The one by which the first row has the most names of fields, or else the first.
DELIMITERS = ",;\t"

#: A row's first line, its cells, and what is wrong with it.
_Row = tuple[int, list[str], str]


class CsvRows:
    """Rows as spreadsheets write them (RFC 4180): a quote within quotes is doubled."""

    name = "csv"
    unit = "row"
    is_stream = True

    def count(self, stream: BinaryIO) -> int:
        _, rows = _open(stream)
        return sum(1 for _ in rows)

    def entries(self, stream: BinaryIO, start: int) -> Iterator[Entry]:
        columns, rows = _open(stream)
        # The names are row 1.
        for number, (line, cells, problem) in enumerate(
            itertools.islice(rows, start, None), start + 2
        ):
            place = f"row {number}" if line == number else f"row {number}, line {line}"
            if problem:
                yield Entry(place, problem=problem)
                continue
            try:
                yield Entry(place, columns.job(cells))
            except ValueError as error:
                yield Entry(place, problem=str(error))


def _open(stream: BinaryIO) -> tuple[Columns, Iterator[_Row]]:
    """The columns, and the rows after the first."""
    given = lines(stream)
    first = next(given, b"")
    if not first:
        return Columns(["prompt"]), iter(())
    try:
        header = first.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FormatError("the first row is not UTF-8: save the file as 'CSV UTF-8'") from None

    def known_names(delimiter: str) -> int:
        try:
            names = next(csv.reader([header], delimiter=delimiter, strict=True))
        except csv.Error:
            return 0
        return sum(is_known(name.strip().lower()) for name in names)

    delimiter = max(DELIMITERS, key=known_names)
    # Bytes that are not UTF-8 become halves of surrogate pairs, which `_rows` finds in their row.
    others = (line.decode("utf-8", "surrogateescape") for line in given)
    rows = _rows(itertools.chain([header], others), delimiter)
    _, names, problem = next(rows)
    if problem:
        raise FormatError(f"the first row: {problem}")
    return Columns(names), rows


def _rows(text: Iterable[str], delimiter: str) -> Iterator[_Row]:
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
            "".join(cells).encode()
        except StopIteration:
            return
        except csv.Error as error:
            yield line, [], f"{error}; is a quote missing, or not doubled?"
        except UnicodeEncodeError:
            yield line, [], "not UTF-8"
        else:
            yield line, cells, ""

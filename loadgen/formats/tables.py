"""Tables: CSV and Parquet, whose columns are fields of jobs."""

import contextlib
import csv
import datetime as dt
import decimal
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, cast, get_args

from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.job import settings_table
from imagefleet.job.chain import THEN_FIELD
from imagefleet.job.message import FAILURE_FIELD, Job
from imagefleet.job.passes import extras
from loadgen.formats.lines import MAX_JOB_LENGTH, Entry, Format, FormatError, lines

#: Fields whose cells are text as it stands, with its white space.
_PROMPTS = {"prompt", "negative_prompt", "hr_prompt", "hr_negative_prompt"}


#: Fields whose cells are JSON objects; `metadata.NAME` is a column for one key of an object.
_OBJECTS = {"alwayson_scripts", "metadata", "output", "override_settings"}


def _is_text(annotation: Any) -> bool:
    return annotation is str or any(map(_is_text, get_args(annotation)))


#: Fields whose cells are text, even if it looks like a number.
_TEXTS = {
    name for name, field in Job.model_fields.items() if _is_text(field.annotation)
} - {*_OBJECTS, THEN_FIELD}
_TEXTS |= {"hr_checkpoint_name", "sampler_index"}

_KNOWN = {*Job.model_fields, *_TEXTS, *_OBJECTS, *settings_table.FIELDS, extras.IMAGE}

#: Columns that are left out: why a job failed, and the index of a pandas frame.
_LEFT_OUT = re.compile(rf"{FAILURE_FIELD}(\..*)?|__index_level_\d+__")

_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")


class Columns:
    """Makes jobs of rows; raises FormatError for a column that is no field or there twice, say."""

    def __init__(self, names: Sequence[str]) -> None:
        keys = [_key(name) for name in names]
        if not {"prompt", "upscaler_1", "infotext"} & {*keys}:
            shown = ", ".join(repr(key[:40]) for key in keys[:10])
            raise FormatError(
                f"there is no column 'prompt' among {shown}: the first row should have the names"
                " of the columns (if it has one prompt per line: --format txt)"
            )
        for key in keys:
            if keys.count(key) > 1 and key:
                raise FormatError(f"the column {key[:80]!r} is there twice")
            field, dot, rest = key.partition(".")
            is_known = field in _OBJECTS and rest if dot else field in _KNOWN
            if key and not _LEFT_OUT.fullmatch(key) and not is_known:
                raise FormatError(
                    f"the column {key[:80]!r} is no field of a job"
                    f"{validation.suggestion(key, _KNOWN)}; remove it, or name it"
                    f" {'metadata.' + key[:80]!r} to have it stored with the image"
                )
        self._columns = [(key, *key.split(".", 1)) for key in keys]

    def entry(self, place: str, cells: Iterable[Any]) -> Entry:
        """A row's job; none for a row without values."""
        try:
            return Entry(place, self._job(cells))
        except ValueError as error:
            return Entry(place, problem=str(error))

    def _job(self, cells: Iterable[Any]) -> str:
        fields = {}
        for number, cell in enumerate(cells):
            # A missing number of pandas is NaN.
            if (
                cell is None
                or cell == ""
                or (isinstance(cell, float) and math.isnan(cell))
            ):
                continue
            key, *path = self._columns[number] if number < len(self._columns) else ("",)
            if isinstance(cell, str) and not cell.strip() and key != "prompt":
                continue
            if not key:
                raise ValueError(
                    f"cell {number + 1} has no column: a cell with a comma or a line break"
                    " needs quotes"
                )
            if _LEFT_OUT.fullmatch(key):
                continue
            if len(path) == 1:
                fields[key] = _value(key, cell)
            else:
                fields.setdefault(path[0], {})[path[1]] = cell
        return json.dumps(fields, ensure_ascii=False, default=_plain) if fields else ""


def _key(name: str) -> str:
    name = name.strip()
    field, dot, rest = name.partition(".")
    return f"{field.lower()}{dot}{rest}"


def _value(field: str, cell: Any) -> Any:
    if field in _TEXTS:
        # Ids that are numbers, in Parquet.
        text = str(cell) if type(cell) is int else cell
        return text.strip() if isinstance(text, str) and field not in _PROMPTS else text
    if isinstance(cell, list) and field in _OBJECTS:
        return dict(cell)  # a map of Parquet is a list of pairs
    if not isinstance(cell, str):
        return cell
    text = cell.strip()
    if field in Job.model_fields and field not in _OBJECTS and field != THEN_FIELD:
        # The job reads numbers and booleans from text; some spreadsheets write 7,5.
        return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text
    try:
        return json.loads(text.lower() if text.lower() in {"true", "false"} else text)
    except (ValueError, RecursionError):
        if field in _OBJECTS or field == THEN_FIELD:
            raise ValueError(f"{field}: is not JSON") from None
        return text


#: The one that the first row has most of, or else the first.
DELIMITERS = ",;\t"

_IN_QUOTES = re.compile(r'"(?:[^"]|"")*"')

#: Lines within a cell that may be rows: few if each has a row's separators, or many.
_FEW_LINES = 3
_MANY_LINES = 100


class CsvRows(Format):
    """Rows as spreadsheets write them (RFC 4180): a quote within quotes is doubled.

    Between tabs, a quote that does not close in its cell is a letter,
    as most programs write it.
    """

    name = "csv"
    suffixes = (".csv", ".tsv")
    unit = "row"

    def count(self, stream: BinaryIO) -> int:
        _, _, rows = _open(stream)
        return sum(1 for _ in rows)

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        columns, delimiter, rows = _open(stream)
        # The names are row 1.
        for number, (line, cells) in enumerate(rows, 2):
            place = f"row {number}"
            if line != number:
                place += f", line {line}"
            source = delimiter.join(cells)
            if _BYTES.search(source):
                shown = source.encode(errors="replace").decode()
                yield Entry(place, problem="not UTF-8", line=line, source=shown)
                continue
            yield columns.entry(place, cells)._replace(
                line=line, source=source, notice=_notice(cells, delimiter)
            )


#: Bytes that are not UTF-8, as `surrogateescape` decodes them.
_BYTES = re.compile("[\ud800-\udfff]")


#: Excel's word in a first line for the delimiter of all others.
_SEPARATOR = re.compile(rb"(?:\xef\xbb\xbf)?sep=([,;\t])\r?\n", re.IGNORECASE)

_CHUNK_BYTES = 2**18


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a table, which end in CR alone where old programs of macOS wrote them."""
    if not hasattr(stream, "peek"):
        stream = io.BufferedReader(cast("io.RawIOBase", stream))
    head = stream.peek(1)
    if b"\r" not in head or b"\n" in head:
        return lines(stream)
    return _lines_ending_in_cr(stream)


def _lines_ending_in_cr(stream: BinaryIO) -> Iterator[bytes]:
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\r")
        yield from (line + b"\n" for line in whole)
        if len(rest) > MAX_JOB_LENGTH:
            raise FormatError(
                f"a line has more than {MAX_JOB_LENGTH:,} bytes, and no job has so many"
            )
    if rest:
        yield rest


#: The first line of each row, and its cells.
_Rows = Iterator[tuple[int, list[str]]]


def _open(stream: BinaryIO) -> tuple[Columns, str, _Rows]:
    """The columns, the delimiter, and the rows after the first."""
    given = _lines(stream)
    first = next(given, b"")
    told = _SEPARATOR.fullmatch(first)
    if told:
        first = next(given, b"")
    if not first:
        return Columns(["prompt"]), ",", iter(())
    try:
        header = first.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FormatError(
            "the first row is not UTF-8: save the file as 'CSV UTF-8'"
        ) from None
    delimiter = told[1].decode() if told else max(DELIMITERS, key=header.count)
    others = (line.decode("utf-8", "surrogateescape") for line in given)
    rows = _rows(itertools.chain([header], others), delimiter, begins=1 + bool(told))
    _, names = next(rows)
    return Columns(names), delimiter, rows


def _rows(text: Iterable[str], delimiter: str, *, begins: int) -> _Rows:
    """Reads rows; raises FormatError where a quote is missing.

    *begins*: the number of the first line.
    """
    if delimiter == "\t":
        yield from enumerate(map(_between_tabs, text), start=begins)
        return
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    for number in itertools.count(1):
        line = reader.line_num + begins
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise FormatError(
                f"row {number}, which begins in line {line}: {error}; is a quote missing, or"
                " not doubled?"
            ) from None
        if cells is None:
            return
        yield line, cells


def _between_tabs(line: str) -> list[str]:
    """The cells of a line; raises FormatError for one that may go on in the next line."""
    cells = line.rstrip("\r\n").split("\t")
    if cells[-1].startswith('"') and cells[-1].count('"') % 2:
        raise FormatError(
            f"the last cell of the line {line[:40]!r} opens a quote that the line does not close:"
            " save cells of several lines as .csv"
        )
    return [
        cell[1:-1].replace('""', '"') if _IN_QUOTES.fullmatch(cell) else cell
        for cell in cells
    ]


def _notice(cells: Sequence[str], delimiter: str) -> str:
    """Warning about a cell that holds many whole lines; empty for a usual row."""
    middle = max(cells, key=len, default="").split("\n")[1:-1]
    separators = {line.count(delimiter) for line in middle}
    look_like_rows = len(cells) > 1 and separators == {len(cells) - 1}
    if len(middle) < (_FEW_LINES if look_like_rows else _MANY_LINES):
        return ""
    return f"a quoted cell holds {len(middle):,} lines that look like rows: is a quote missing?"


#: Rows that are in memory as Python's values.
_BATCH_ROWS = 1_000


class ParquetRows(Format):
    """The rows of a Parquet file, read by pyarrow, which is an extra, `parquet`."""

    name = "parquet"
    suffixes = (".parquet",)
    unit = "row"
    is_stream = False

    def count(self, stream: BinaryIO) -> int:
        with _opened(stream) as file:
            Columns(file.schema_arrow.names)
            return int(file.metadata.num_rows)

    def entries(self, stream: BinaryIO) -> Iterator[Entry]:
        with _opened(stream) as file:
            columns = Columns(file.schema_arrow.names)
            rows = (
                row
                for batch in file.iter_batches(_BATCH_ROWS)
                for row in batch.to_pylist()
            )
            for number, row in enumerate(rows, 1):
                yield columns.entry(f"row {number}", row.values())


def _plain(value: Any) -> Any:
    """Converts a value of Parquet that JSON has no type for; raises ValueError if it cannot."""
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    raise ValueError(f"a cell holds {type(value).__name__}, which a job cannot")


@contextlib.contextmanager
def _opened(stream: BinaryIO) -> Iterator[Any]:
    """A ParquetFile, whose errors are FormatErrors in the block."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise SetupError(
            "to read Parquet, install pyarrow: pip install '.[parquet]'"
        ) from None
    try:
        yield parquet.ParquetFile(stream)
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise FormatError(
            f"it is not a Parquet file, or damaged: {reason[:200]}"
        ) from None

"""Opens files of jobs: the format by name, gzip by content."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import BinaryIO

from loadgen.formats.json_array import JsonArray
from loadgen.formats.lines import Format, JsonLines, PromptLines
from loadgen.formats.tables import CsvRows, ParquetRows

FORMATS: Mapping[str, Format] = {
    each.name: each for each in (JsonLines(), JsonArray(), CsvRows(), PromptLines(), ParquetRows())
}

SUFFIXES: Mapping[str, Format] = {
    ".jsonl": FORMATS["jsonl"],
    ".ndjson": FORMATS["jsonl"],
    ".json": FORMATS["json"],
    ".csv": FORMATS["csv"],
    ".tsv": FORMATS["csv"],
    ".txt": FORMATS["txt"],
    ".parquet": FORMATS["parquet"],
}

GZIP_SUFFIX = ".gz"
_GZIP_MAGIC = b"\x1f\x8b"

_BUFFER_BYTES = 2**20


def by_name(path: Path) -> Format | None:
    """The format that a file's name tells, without `.gz`; None: it tells none."""
    name = PurePath(path.name.lower().removesuffix(GZIP_SUFFIX))
    return SUFFIXES.get(name.suffix)


class _Observed(io.RawIOBase):
    """A stream that reports what is read of it."""

    def __init__(
        self, stream: io.BufferedReader | gzip.GzipFile, on_data: Callable[[memoryview], None]
    ) -> None:
        self._stream = stream
        self._on_data = on_data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._stream.read1(len(buffer))  # not more than a pipe has
        buffer[: len(data)] = data
        self._on_data(memoryview(data))
        return len(data)


def observed(
    stream: io.BufferedReader | gzip.GzipFile, on_data: Callable[[memoryview], None]
) -> BinaryIO:
    """*stream* as it is; *on_data* gets each piece of it."""
    return io.BufferedReader(_Observed(stream, on_data), _BUFFER_BYTES)


def decompressed(
    file: io.BufferedReader, on_data: Callable[[memoryview], None] = lambda _: None
) -> BinaryIO:
    """The content of a file that may be gzip, and damaged: EOFError, zlib.error or OSError."""
    if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return observed(gzip.GzipFile(fileobj=file), on_data)
    return observed(file, on_data)

"""Opens files of jobs: the format by name, gzip by content."""

from __future__ import annotations

import gzip
import io
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import cast

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


def by_name(path: Path) -> Format | None:
    """The format that a file's name tells, without `.gz`; None: it tells none."""
    name = PurePath(path.name.lower().removesuffix(GZIP_SUFFIX))
    return SUFFIXES.get(name.suffix)


def decompressed(file: io.BufferedReader) -> io.BufferedReader:
    """The content of a file that may be gzip, and damaged: EOFError, zlib.error or OSError."""
    if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return cast("io.BufferedReader", gzip.GzipFile(fileobj=file))
    return file

"""Opens files of jobs: the format by name, gzip by content."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from imagefleet import errors
from loadgen.formats.json_array import JsonArray
from loadgen.formats.lines import Format, JsonLines, PromptLines
from loadgen.formats.tables import CsvRows, ParquetRows

FORMATS: Mapping[str, Format] = {
    each.name: each for each in (JsonLines(), JsonArray(), CsvRows(), PromptLines(), ParquetRows())
}

_GZIP_MAGIC = b"\x1f\x8b"


def find(
    path: Path,
    name: str | None = None,
    formats: Mapping[str, Format] = FORMATS,
    other_suffixes: Iterable[str] = (),
) -> Format:
    """The format *name*, or else that of the file's name, without `.gz`; or raises SetupError."""
    known = "|".join(formats)
    if name is not None:
        if name not in formats:
            raise errors.SetupError(f"--format {name[:40]}: should be {known}")
        return formats[name]
    for form in formats.values():
        if path.name.lower().removesuffix(".gz").endswith(form.suffixes):
            return form
    suffixes = sorted([*other_suffixes, *(each for f in formats.values() for each in f.suffixes)])
    raise errors.SetupError(
        f"{path}: the name must end in {', '.join(suffixes)} or one of these with .gz; or choose"
        f" --format {known}"
    )


def decompressed(file: io.BufferedReader) -> io.BufferedReader:
    """The content of a file that may be gzip, and damaged: EOFError, zlib.error or OSError."""
    if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return cast("io.BufferedReader", gzip.GzipFile(fileobj=file))
    return file

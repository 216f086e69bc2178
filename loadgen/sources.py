"""Sources of jobs: a template, a file, standard input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Unpack, cast

from imagefleet import errors
from loadgen import template
from loadgen.file_source import FORMATS, FileSource, StreamSource, Terms, find_format
from loadgen.template_source import TemplateSource

#: Messages by position, None for a position without one; the same identity means the same messages.
Source = TemplateSource | FileSource | StreamSource

_STREAMED = {name: form for name, form in FORMATS.items() if form.is_stream}


def open_source(
    name: str, *, form: str | None = None, seed: int | None = None, **terms: Unpack[Terms]
) -> Source:
    """The source for a file's name; `-` is standard input. *form* overrides what the name tells.

    The report of the *terms* says whether rows that are no jobs are skipped; else they are a
    SetupError.
    """
    path, report = Path(name), terms.get("report")
    if form is None and path.suffix in template.SUFFIXES:
        if report is not None and (report.skips or report.rejects):
            flag = "--skip-invalid" if report.skips else "--rejects"
            raise errors.SetupError(f"{flag} is for files of jobs, not for templates")
        return TemplateSource(path, seed=seed, **terms)
    if seed is not None:
        raise errors.SetupError("--seed is for templates, not for files of jobs")
    if name == "-":
        stream = cast("io.BufferedReader", sys.stdin.buffer)
        found = find_format(path, form or "jsonl", _STREAMED)
        return StreamSource(stream, found, **terms)
    found = find_format(path, form, other_suffixes=template.SUFFIXES)
    return FileSource(path, found, **terms)

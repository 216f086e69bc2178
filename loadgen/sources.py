"""Sources of jobs: a template, a file, standard input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import cast

from imagefleet import errors
from imagefleet.signing import SigningKey
from loadgen import template
from loadgen.file_source import FileSource, OnInvalid, StreamSource
from loadgen.formats import files
from loadgen.formats.lines import Format
from loadgen.template_source import TemplateSource

#: Messages by position, None for a position without one; the same identity means the same messages.
Source = TemplateSource | FileSource | StreamSource


def open_source(
    name: str,
    *,
    form: str | None = None,
    count: int | None = None,
    seed: int | None = None,
    on_invalid: OnInvalid | None = None,
    key: SigningKey | None = None,
    campaign: str | None = None,
) -> Source:
    """The source for a file's name, of jobs signed with *key*; `-` is standard input.

    *campaign* is for jobs without one. *form* overrides what the name tells. *on_invalid* gets the
    place of each invalid job, which is skipped; without it, the first is a SetupError.
    """
    path = Path(name)
    if form is None and path.suffix in template.SUFFIXES:
        if on_invalid is not None:
            raise errors.SetupError("--skip-invalid is for files of jobs, not for templates")
        return TemplateSource(path, count=count, seed=seed, key=key, campaign=campaign)
    if seed is not None:
        raise errors.SetupError("--seed is for templates, not for files of jobs")
    if name == "-":
        return StreamSource(
            cast("io.BufferedReader", sys.stdin.buffer),
            _format(form or "jsonl", must_stream=True),
            count=count,
            on_invalid=on_invalid,
            key=key,
            campaign=campaign,
        )
    found = _format(form) if form else files.by_name(path)
    if found is None:
        suffixes = ", ".join(sorted(template.SUFFIXES | files.SUFFIXES.keys()))
        raise errors.SetupError(
            f"{name}: the name must end in {suffixes} or one of these with .gz, or be - for"
            f" standard input; or choose --format {'|'.join(files.FORMATS)}"
        )
    return FileSource(path, found, count=count, on_invalid=on_invalid, key=key, campaign=campaign)


def _format(name: str, *, must_stream: bool = False) -> Format:
    found = files.FORMATS.get(name)
    if found is None or (must_stream and not found.is_stream):
        known = "|".join(
            each.name for each in files.FORMATS.values() if each.is_stream or not must_stream
        )
        where = " for standard input" if must_stream else ""
        raise errors.SetupError(f"--format {name[:40]}: should be {known}{where}")
    return found

"""Sources of jobs: a template, a file, standard input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import cast

from imagefleet import errors
from imagefleet.signing import JobSigner
from loadgen import template
from loadgen.file_source import FORMATS, FileSource, StreamSource, find_format
from loadgen.rejects import Report
from loadgen.template_source import TemplateSource

#: Messages by position, None for a position without one; the same identity means the same messages.
Source = TemplateSource | FileSource | StreamSource

_STREAMED = {name: form for name, form in FORMATS.items() if form.is_stream}


def open_source(
    name: str,
    *,
    form: str | None = None,
    count: int | None = None,
    seed: int | None = None,
    report: Report | None = None,
    signer: JobSigner | None = None,
    campaign: str | None = None,
) -> Source:
    """The source for a file's name, of jobs signed by *signer*; `-` is standard input.

    *campaign* is for jobs without one. *form* overrides what the name tells. *report* is told of
    each row that is no job, and whether such rows are skipped; else they are a SetupError.
    """
    path = Path(name)
    if form is None and path.suffix in template.SUFFIXES:
        if report is not None and (report.skips or report.rejects):
            flag = "--skip-invalid" if report.skips else "--rejects"
            raise errors.SetupError(f"{flag} is for files of jobs, not for templates")
        return TemplateSource(path, count=count, seed=seed, signer=signer, campaign=campaign)
    if seed is not None:
        raise errors.SetupError("--seed is for templates, not for files of jobs")
    if name == "-":
        return StreamSource(
            cast("io.BufferedReader", sys.stdin.buffer),
            find_format(path, form or "jsonl", _STREAMED),
            count=count,
            report=report,
            signer=signer,
            campaign=campaign,
        )
    found = find_format(path, form, other_suffixes=template.SUFFIXES)
    return FileSource(path, found, count=count, report=report, signer=signer, campaign=campaign)

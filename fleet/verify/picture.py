"""Reads an image's file as what it is compared by; the file may be anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from fleet import contact_sheet
from imagefleet import errors, likeness
from imagefleet.job import embedded
from imagefleet.job.message import Job, read_job
from imagefleet.signing import TrustedKeys


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: its (width, height) in pixels and its fingerprint."""

    size: tuple[int, int]
    fingerprint: likeness.Fingerprint


def decode(data: bytes) -> Image.Image | None:
    """A file's image in RGB; None if it is none that a worker can have stored."""
    try:
        with contact_sheet.opened(data) as image:
            return image.convert("RGB")
    except contact_sheet.DamagedImageError:
        return None


def read(data: bytes) -> Picture | None:
    """The picture of a file; None as of `decode`."""
    image = decode(data)
    if image is None:
        return None
    return Picture(image.size, likeness.fingerprint(np.asarray(image)))


def job_in(data: bytes, trusted: TrustedKeys | None = None) -> tuple[str, Job] | None:
    """The message in an image's file and its job; None if there is none that is valid.

    With *trusted* keys, only one that is signed with one of them is.
    """
    message = embedded.find(data)
    try:
        return None if message is None else (message, read_job(message, "none", trusted))
    except errors.JobError:
        return None

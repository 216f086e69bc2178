"""Reads an image's file as what it is compared by; the file may be anything."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from imagefleet import errors, likeness
from imagefleet.job import embedded
from imagefleet.job.message import MAX_IMAGE_PIXELS, Job, read_job
from imagefleet.signing import TrustedKeys

#: Formats that workers store; Pillow reads dozens of formats, some through other programs.
_FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: its (width, height) in pixels and its fingerprint."""

    size: tuple[int, int]
    fingerprint: likeness.Fingerprint


def decode(data: bytes) -> Image.Image | None:
    """A file's image in RGB; None if it is none that a worker can have stored."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:  # before the pixels take memory
                return None
            return image.convert("RGB")
    except Exception:  # noqa: BLE001 - Pillow raises what it comes upon in a damaged file
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

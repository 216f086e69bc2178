"""Reads the files of images, which may be anything: pixels, fingerprints and the jobs in them."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from imagefleet import errors, likeness
from imagefleet.job import embedded
from imagefleet.job.message import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, Job, read_job
from imagefleet.redaction import printable
from imagefleet.signing import TrustedKeys

#: Formats that workers store; Pillow reads dozens of formats, some through other programs.
_FORMATS = ("PNG", "JPEG", "WEBP")


class DamagedImageError(ValueError):
    """A file is not an image that a worker stored, or too large; says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image: its (width, height) in pixels and its fingerprint."""

    size: tuple[int, int]
    fingerprint: likeness.Fingerprint


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """An image's file, which may be anything; its pixels are decoded in the block.

    Raises DamagedImageError if it is no image of a worker, or larger than one can be.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise DamagedImageError(f"has {len(data):,} bytes; {MAX_IMAGE_BYTES:,} at most are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about what is damaged or huge
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                if image.width * image.height > MAX_IMAGE_PIXELS:  # before they take memory
                    raise DamagedImageError(  # noqa: TRY301 - told as all others are
                        f"has {image.width:,} x {image.height:,} pixels; {MAX_IMAGE_PIXELS:,} at"
                        " most are read"
                    )
                yield image
    except DamagedImageError:
        raise
    except UnidentifiedImageError:
        raise DamagedImageError("is not a PNG, JPEG or WebP image") from None
    except Image.DecompressionBombError:
        raise DamagedImageError(f"has more than {MAX_IMAGE_PIXELS:,} pixels") from None
    except Exception as error:  # noqa: BLE001 - Pillow's parsers raise a dozen kinds
        reason = printable(" ".join(str(error).split()))[:200]
        raise DamagedImageError(f"is a damaged image ({reason or type(error).__name__})") from None


def decode(data: bytes) -> Image.Image | None:
    """A file's image in RGB; None if it is none that a worker can have stored."""
    try:
        with opened(data) as image:
            return image.convert("RGB")
    except DamagedImageError:
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

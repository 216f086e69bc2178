"""Images that a job is given: within its message, or by name in the storage."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from imagefleet.job.sizes import MAX_BLOB_NAME, MAX_MESSAGE_BYTES

#: Images of the fleet itself are named by this and their blob; all others are below `INPUTS`.
IMAGES = "images/"

#: The folder of the container of files.
INPUTS = "inputs/"

#: A segment of an image's path; as of a LoRA's name, none begins with a dot or a hyphen.
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9_ .+()~-]{0,199}"
_NAME = re.compile(rf"(?:{_SEGMENT}/){{0,7}}{_SEGMENT}(?<=\.)(?:png|jpe?g|webp)", re.IGNORECASE)

_DATA_URL = re.compile(r"data:image/[a-z]{3,4};base64,", re.IGNORECASE)

#: The first bytes of PNG, JPEG and WebP.
_IMAGE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP", re.DOTALL)


class Named(NamedTuple):
    """A blob of the container of files, or of images."""

    container: Literal["files", "images"]
    blob: str


def place(source: str) -> Named | None:
    """The place of a named image; None for one within the message."""
    if "." not in source:  # no letter of base64
        return None
    if source.startswith(IMAGES):
        return Named("images", source.removeprefix(IMAGES))
    return Named("files", INPUTS + source)


def content(source: str) -> bytes:
    """The file of an image within the message."""
    prefix = _DATA_URL.match(source)
    return base64.b64decode(source[prefix.end() :] if prefix else source, validate=True)


def _check(source: str) -> str:
    if len(source) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"has {len(source):,} characters, more than a message holds: store the image in"
            f" {INPUTS} of the container of files, and give its name"
        )
    if re.match("https?:", source, re.IGNORECASE):
        raise ValueError(
            f"is an address, which is not fetched: store the image in {INPUTS} of the container of"
            " files, and give its name"
        )
    if place(source) is not None:
        if not _NAME.fullmatch(source) or len(INPUTS + source) > MAX_BLOB_NAME:
            raise ValueError(
                "should be a name that ends in .png, .jpg, .jpeg or .webp, of letters, digits,"
                " spaces and _ . + ( ) - in up to 8 parts with / between them, or base64"
            )
        return source
    try:
        data = content(source)
    except (binascii.Error, ValueError):
        raise ValueError(
            "is neither the base64 of an image nor a name that ends in .png, .jpg, .jpeg or .webp"
        ) from None
    if not _IMAGE.match(data):
        raise ValueError("is no PNG, JPEG or WebP image in base64")
    return source


ImageSource = Annotated[str, AfterValidator(_check)]
"""`cat.png` is inputs/cat.png in the container of files, `images/spring/0001.png` is
spring/0001.png in that of images; else base64, with or without the prefix of a data URL."""

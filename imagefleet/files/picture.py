"""Reads the files of images, which may be anything: pixels, fingerprints and the jobs in them.

PNG has its job in a text chunk, JPEG and WebP in the Exif data.
"""

import contextlib
import json
import re
import warnings
from collections.abc import Collection, Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from imagefleet import likeness
from imagefleet.errors import JobError
from imagefleet.job import sizes
from imagefleet.job.message import (
    DIGEST_FIELD,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    SUFFIXES,
    Job,
    read_job,
)
from imagefleet.job.passes import img2img
from imagefleet.job.sizes import Size
from imagefleet.redaction import printable
from imagefleet.signing import TrustedJobs

#: Formats that workers store; Pillow reads dozens of formats, some through other programs.
_FORMATS = ("PNG", "JPEG", "WEBP")

#: What people's programs send beside these. Phones' JPEG with several images is found as a JPEG.
CONVERTED = ("GIF", "BMP")

#: The keyword of the PNG text chunk that holds an image's parameters.
PNG_KEYWORD = "imagefleet"

#: The word of an image's text before JSON of the fields for which AUTOMATIC1111 has none.
OWN_WORD = "imagefleet"
OWN_FIELDS = img2img.OWN_FIELDS | {
    "prompt",
    "negative_prompt",
    "enable_prompt_comments",
    "sd_vae_decode_method",
    "alwayson_scripts",
    "init_images",
    "s_churn",
    "s_tmin",
    "s_tmax",
    "s_noise",
}

#: JSON in ASCII takes three times the bytes of a message at most (`\ud83d\ude00` for four bytes).
MAX_MESSAGE_BYTES = 3 * sizes.MAX_MESSAGE_BYTES

#: Characters of an image's text in which hashes of LoRAs are looked for.
_MAX_TEXT = 2**20

#: The code that precedes AUTOMATIC1111's text in Exif data.
_UNICODE = b"UNICODE\0"


#: A name and its value in the last line of an image's text, as A1111 reads it.
_PARAMETER = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')

#: A LoRA's name and its hash in an image's text.
_LORA_HASH = re.compile(r"([^,:]+): ([0-9a-f]+)")


class DamagedImageError(ValueError):
    """A file is not an image that a worker stored, or too large; says why."""


class Picture(NamedTuple):
    """An image: its (width, height) in pixels and its fingerprint."""

    size: Size
    fingerprint: likeness.Fingerprint


@contextlib.contextmanager
def opened(file: bytes | Path, also: Collection[str] = ()) -> Iterator[Image.Image]:
    """An image in a file, which may be anything: raises DamagedImageError, in the block as well.

    That of a path, whose header alone is read, may be of any size. *also* are more of Pillow's
    formats than those that workers store.
    """
    source = BytesIO(file) if isinstance(file, bytes) else file
    if isinstance(file, bytes) and len(file) > MAX_IMAGE_BYTES:
        raise DamagedImageError(
            f"has {len(file):,} bytes; {MAX_IMAGE_BYTES:,} at most are read"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about what is damaged or huge
            with Image.open(source, formats=(*_FORMATS, *also)) as image:
                is_read = isinstance(file, bytes)
                if (
                    is_read and image.width * image.height > MAX_IMAGE_PIXELS
                ):  # they take memory
                    raise DamagedImageError(  # noqa: TRY301 - told as all others are
                        f"has {image.width:,} x {image.height:,} pixels; {MAX_IMAGE_PIXELS:,} at"
                        " most are read"
                    )
                yield image
    except DamagedImageError:
        raise
    except UnidentifiedImageError:
        more = "".join(f", {name}" for name in also)
        raise DamagedImageError(f"is not a PNG, JPEG or WebP{more} image") from None
    except Image.DecompressionBombError:
        raise DamagedImageError(f"has more than {MAX_IMAGE_PIXELS:,} pixels") from None
    except Exception as error:  # noqa: BLE001 - Pillow's parsers raise a dozen kinds
        reason = printable(" ".join(str(error).split()))[:200]
        raise DamagedImageError(
            f"is a damaged image ({reason or type(error).__name__})"
        ) from None


def accepted(data: bytes) -> tuple[bytes, str]:
    """A stranger's image as workers read it, and its suffix; raises DamagedImageError.

    It is decoded once, so that none can surprise a worker; what is `CONVERTED` becomes a PNG.
    """
    with opened(data, also=CONVERTED) as image:
        image.load()
        kind = str(image.format).lower()
        if kind in SUFFIXES:
            return data, SUFFIXES[kind]
        made = BytesIO()
        upright = ImageOps.exif_transpose(image)
        mode = "RGBA" if upright.has_transparency_data else "RGB"
        upright.convert(mode).save(made, "PNG")
        return made.getvalue(), "png"


def decode(data: bytes) -> Image.Image | None:
    """A file's image in RGB; None if it is none that a worker can have stored."""
    try:
        with opened(data) as image:
            return eight_bits(image).convert("RGB")
    except DamagedImageError:
        return None


def eight_bits(image: Image.Image) -> Image.Image:
    """The image; one in 16-bit grey in 8 bits, as Pillow's `convert` makes all above 255 white."""
    if not image.mode.startswith("I;16"):
        return image
    scaled = (np.asarray(image, np.uint32) * 255 + 0x7FFF) // 0xFFFF
    return Image.fromarray(scaled.astype(np.uint8))


def read(data: bytes) -> Picture | None:
    """The picture of a file; None as of `decode`."""
    image = decode(data)
    if image is None:
        return None
    return Picture(image.size, likeness.fingerprint(np.asarray(image)))


def job_in(data: bytes, trusted: TrustedJobs | None = None) -> tuple[str, Job] | None:
    """The valid message in an image's file, one of the *trusted* jobs, and its job."""
    message = message_in(data)
    try:
        return (
            None if message is None else (message, read_job(message, "none", trusted))
        )
    except JobError:
        return None


def message_in(data: bytes) -> str | None:
    """The message of the job in an image's file; None if there is none that a queue can carry."""
    try:
        with opened(data) as image:
            if (
                found := image.info.get(PNG_KEYWORD)
            ) is None:  # to look in Exif reads a whole PNG
                found = (
                    image.getexif()
                    .get_ifd(ExifTags.IFD.Exif)
                    .get(ExifTags.Base.ImageHistory)
                )
        fields = json.loads(str(found)[: MAX_MESSAGE_BYTES + 1])
    except (ValueError, RecursionError):  # also a DamagedImageError
        return None
    if not isinstance(fields, dict):
        return None
    # The largest message has no room for a digest that it was sent without.
    shorter = {name: value for name, value in fields.items() if name != DIGEST_FIELD}
    for some, ascii_only in ((fields, True), (fields, False), (shorter, False)):
        text = json.dumps(some, ensure_ascii=ascii_only, separators=(",", ":"))
        if sizes.fits(text):
            return text
    return None


def parameters(image: Image.Image, max_characters: int) -> str:
    """AUTOMATIC1111's text in an open image; at most so many characters, empty if there is none."""
    if (text := image.info.get("parameters")) is not None:
        return str(text)[:max_characters]
    exif = image.getexif()
    tags = {**exif, **exif.get_ifd(ExifTags.IFD.Exif)}
    comment: str | bytes = tags.get(ExifTags.Base.UserComment, b"")
    if isinstance(comment, str):
        return comment[:max_characters]
    if comment.startswith(_UNICODE):
        text = comment[len(_UNICODE) : len(_UNICODE) + 2 * max_characters]
        # SwarmUI's is little-endian.
        order = "le" if text[1:2] == b"\0" else "be"
        return text.decode(f"utf-16-{order}", errors="replace")
    return ""


def parsed_parameters(text: str) -> dict[str, str]:
    """The parameters in an image's text, by A1111's names; its prompts as well."""
    *lines, last = text.strip().split("\n")
    found = {name: value.strip('"') for name, value in _PARAMETER.findall(last)}
    if "Steps" not in found:
        lines = [*lines, last]
        found = {}
    prompt, _, negative_prompt = "\n".join(lines).partition("Negative prompt:")
    return {
        "Prompt": prompt.strip(),
        "Negative prompt": negative_prompt.strip(),
    } | found


def lora_hashes(image: Image.Image) -> dict[str, str]:
    """The hashes of the LoRAs that an open image was drawn with, by their names in its text."""
    told = parsed_parameters(parameters(image, _MAX_TEXT)).get("Lora hashes", "")
    return {name.strip(): sha256 for name, sha256 in _LORA_HASH.findall(told)}

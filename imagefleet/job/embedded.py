"""The job in its image's file, so that the image can be drawn again from the file alone.

PNG has it in a text chunk, JPEG and WebP in the Exif data. It is untrusted.
"""

from __future__ import annotations

import io
import json
import struct
from typing import TYPE_CHECKING

from imagefleet.job import sizes

if TYPE_CHECKING:
    from PIL import Image

#: The keyword of the PNG text chunk that holds an image's parameters.
PNG_KEYWORD = "imagefleet"

#: JSON in ASCII takes three times the bytes of a message at most (`\ud83d\ude00` for four bytes).
MAX_BYTES = 3 * sizes.MAX_MESSAGE_BYTES

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_CHECKSUM_BYTES = 4

#: The code that precedes AUTOMATIC1111's text in Exif data.
_UNICODE = b"UNICODE\0"

#: The most PNG chunks that are read before the pixels; a file with more is not from a worker.
_MAX_CHUNKS = 64


def find(data: bytes) -> str | None:
    """The message of the job in an image's file; None if there is none that a queue can carry."""
    found = _in_png(data) if data.startswith(_PNG_SIGNATURE) else _in_exif(data)
    if found is None or len(found) > MAX_BYTES:
        return None
    try:
        fields = json.loads(found)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    for ascii_only in (True, False):
        text = json.dumps(fields, ensure_ascii=ascii_only, separators=(",", ":"))
        if sizes.fits(text):
            return text
    return None


def parameters(image: Image.Image, max_characters: int) -> str:
    """AUTOMATIC1111's text in an open image; at most so many characters, empty if there is none."""
    from PIL import ExifTags

    if (text := image.info.get("parameters")) is not None:
        return str(text)[:max_characters]
    comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
    if isinstance(comment, bytes) and comment.startswith(_UNICODE):
        text = comment[len(_UNICODE) : len(_UNICODE) + 2 * max_characters]
        return text.decode("utf-16-be", errors="replace")
    return ""


def _in_png(data: bytes) -> bytes | None:
    prefix = PNG_KEYWORD.encode() + b"\0"
    place = len(_PNG_SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        try:
            size, kind = struct.unpack_from(">I4s", data, place)
        except struct.error:
            return None
        start = place + struct.calcsize(">I4s")
        if kind == b"IDAT":
            return None
        if kind == b"tEXt" and data.startswith(prefix, start):
            return data[start + len(prefix) : start + size]
        place = start + size + _CHECKSUM_BYTES
    return None


def _in_exif(data: bytes) -> bytes | None:
    from PIL import ExifTags, Image

    try:
        # Reads the header alone, not the pixels.
        with Image.open(io.BytesIO(data), formats=("JPEG", "WEBP")) as image:
            exif = image.getexif().get_ifd(ExifTags.IFD.Exif)
            found = exif.get(ExifTags.Base.ImageHistory)
    except Exception:  # noqa: BLE001 - Pillow raises what it comes upon in a damaged file
        return None
    return found.encode(errors="replace") if isinstance(found, str) else None

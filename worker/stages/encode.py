"""Encodes pixels as PNG, JPEG or WebP with their parameters and their job.

PNG is written here, around Intel's igzip (the `isal` package): 2 ms and 410 KB for a 512x512
photograph where Pillow takes 57 ms and 378 KB at its default level and 19 ms and 423 KB at its
fastest (`benchmarks/stages/encoders.py`). OpenCV (7 ms) and imagecodecs (6 ms) are slower, a
hundred times as large to install, and write no text; fpng (0.7 ms) has no licence.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from isal import isal_zlib
from PIL import ExifTags, Image

from imagefleet import errors
from imagefleet.job import embedded
from imagefleet.job.message import Output
from worker.engine.contract import Pixels

#: igzip's levels 1 to 3 differ by under 1 % in size on photographs; 1 is the fastest.
COMPRESSION_LEVEL = 1

#: PNG's filter "up": each byte minus the one above; smaller than "sub" on photographs.
FILTER_UP = 2

#: The size of one JPEG segment, which limits the EXIF data.
_JPEG_EXIF_BYTES = 65_533


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A file's bytes and its media type."""

    data: bytes
    content_type: str


def encode(pixels: Pixels, output: Output, parameters: str, job: str = "") -> EncodedImage:
    """Encodes one image, [height, width, 3] RGB, with its parameters and its job as text.

    A JPEG goes without the job where both are too long for it.

    Raises:
        JobError: the parameters are too long for a JPEG.
        TransientError: the image is all one colour, which no working engine generates.
    """
    refuse_one_colour(pixels)
    if output.format == "png":
        data = _png(pixels, parameters, job)
    else:
        data = _with_pillow(pixels, output, parameters, job)
    return EncodedImage(data, f"image/{output.format}")


def refuse_one_colour(pixels: Pixels) -> None:
    """Refuses what no working engine generates.

    Raises:
        TransientError: the image is all one colour.
    """
    if (pixels[0] == pixels[0, 0]).all() and (pixels == pixels[0, 0]).all():
        raise errors.TransientError("the image came out all one colour; it is not stored")


def _png(pixels: Pixels, parameters: str, job: str) -> bytes:
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            # First: some viewers show the first text of a file, whatever its name.
            _text_chunk("parameters", parameters),
            _text_chunk(embedded.PNG_KEYWORD, job) if job else b"",
            _chunk(b"IDAT", isal_zlib.compress(_filtered(pixels), COMPRESSION_LEVEL)),
            _chunk(b"IEND", b""),
        )
    )


def _filtered(pixels: Pixels) -> npt.NDArray[np.uint8]:
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    filtered = np.empty((height, 1 + width * channels), np.uint8)
    filtered[:, 0] = FILTER_UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    return filtered


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(data, zlib.crc32(kind))
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", checksum)))


def _text_chunk(keyword: str, text: str) -> bytes:
    """A tEXt chunk where Latin-1 holds the text, else iTXt, as in AUTOMATIC1111's own files."""
    try:
        return _chunk(b"tEXt", keyword.encode() + b"\0" + text.encode("latin-1"))
    except UnicodeEncodeError:
        return _chunk(b"iTXt", keyword.encode() + b"\0\0\0\0\0" + text.encode())


def _with_pillow(pixels: Pixels, output: Output, parameters: str, job: str) -> bytes:
    # A new Image for each call: Pillow keeps save()'s options on the object between threads.
    image = Image.fromarray(pixels)
    exif = _exif(parameters, job)
    if output.format == "jpeg" and len(exif.tobytes()) > _JPEG_EXIF_BYTES:
        exif = _exif(parameters, "")
        if len(exif.tobytes()) > _JPEG_EXIF_BYTES:
            raise errors.JobError(
                "the prompts are too long for a JPEG's metadata (about 32,000 characters): shorten"
                " them or choose png or webp"
            )
    buffer = io.BytesIO()
    image.save(buffer, output.format, quality=output.quality, exif=exif)
    return buffer.getvalue()


def _exif(parameters: str, job: str) -> Image.Exif:
    exif = Image.Exif()
    fields = exif.get_ifd(ExifTags.IFD.Exif)
    fields[ExifTags.Base.UserComment] = b"UNICODE\0" + parameters.encode("utf-16-be")
    if job:
        fields[ExifTags.Base.ImageHistory] = job
    return exif

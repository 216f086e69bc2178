"""Limits of a job: its images' sides and number, its message, metadata and blobs' names."""

import base64
import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from xml.sax.saxutils import escape

import pydantic_core
from pydantic import AfterValidator, JsonValue

from imagefleet.errors import JobError

#: The shortest and the longest side of an image, in pixels.
MIN_SIDE = 64
MAX_SIDE = 2048

#: What a slow node draws in an hour or so: until then a job's images hold a place in a worker.
MAX_IMAGES_PER_JOB = 1000

#: Pixels on a side of one of the latents' cells, AUTOMATIC1111's `opt_f`: images have whole ones.
CELL = 8

#: Azure's limit for the encoded text (XML-escaped UTF-8).
MAX_MESSAGE_BYTES = 65_536

#: `&` becomes `&amp;`.
_MOST_BYTES_A_CHARACTER = 5

#: What workers add to the message of a job with further stages (`imagefleet.job.chain`).
STAGE_BYTES = 512

#: The size of one JPEG segment, which limits the EXIF data.
JPEG_EXIF_BYTES = 65_533

#: Azure's limit for a blob name, in characters.
MAX_BLOB_NAME = 1024

#: Of JSON in UTF-8. The header of the image's blob that holds it has a third more at most
#: (`metadata_header`); Azure allows 8 KiB for all headers.
MAX_METADATA_BYTES = 4096

#: Characters that XML 1.0, in which Azure transfers messages, does not allow.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

#: Made once: `json.dumps` makes one for each text.
_METADATA = json.JSONEncoder(ensure_ascii=False)

BYTE_ORDER_MARK = "\ufeff"

#: The two digits of base64 that are others in addresses.
_URL_SAFE = str.maketrans("-_", "+/")


#: Width and height in pixels.
Size = tuple[int, int]

#: Width and height in pixels, as far as they are known.
PartialSize = tuple[int | None, int | None]


def whole_cells(width: int, height: int) -> Size:
    """The size of the image that is drawn for a job of this size, as AUTOMATIC1111 rounds it."""
    return width // CELL * CELL, height // CELL * CELL


def from_base64(text: str) -> str:
    """A message's JSON from its base64, in lines, url-safe or unpadded; others unchanged."""
    with contextlib.suppress(ValueError):
        return base64.b64decode(text.translate(_URL_SAFE) + "==").decode("utf-8-sig")
    return text


def message_bytes(body: str) -> int:
    """The size of a message as Azure counts it: UTF-8 after XML escaping."""
    return len(escape(body).encode(errors="surrogatepass"))


def fits(body: str) -> bool:
    """True if a queue can carry the message."""
    return message_bytes(body) <= MAX_MESSAGE_BYTES and not _NOT_XML.search(body)


def checked_messages(bodies: Iterable[str]) -> list[str]:
    """The bodies as a list; raises JobError if a queue cannot carry one of them."""
    checked = list(bodies)
    for body in checked:
        # Short ones, as almost all are, are not encoded to be counted.
        if len(body) * _MOST_BYTES_A_CHARACTER > MAX_MESSAGE_BYTES - STAGE_BYTES:
            # The message of a job's first stage leaves room for those of the others.
            is_first = '"then":' in body and '"stage":{' not in body
            most = MAX_MESSAGE_BYTES - STAGE_BYTES * is_first
            size = message_bytes(body)
            if size > most:
                of_chain = " of a job with further stages" if is_first else ""
                raise JobError(
                    f"the message has {size:,} bytes; a queue message{of_chain} holds {most:,}"
                )
        if odd := _NOT_XML.search(body):
            raise JobError(
                f"the message holds the character U+{ord(odd[0]):04X}, which queues cannot carry;"
                " escape it in the JSON"
            )
    return checked


def check_jpeg_text(text: str, more_bytes: int = 0) -> None:
    """Raises JobError for an image's text that fits no JPEG, with *more_bytes* of its header."""
    if len(text.encode("utf-16-be")) + more_bytes > JPEG_EXIF_BYTES:
        raise JobError(
            "the prompts are too long for a JPEG's metadata (about 32,000 characters): shorten them"
            " or choose png or webp"
        )


def metadata_json(metadata: Mapping[str, JsonValue]) -> bytes:
    """A job's metadata as its size is counted; UnicodeEncodeError for half a surrogate pair."""
    return _METADATA.encode(metadata).encode()


def metadata_header(metadata: Mapping[str, JsonValue]) -> str:
    """A job's metadata as the header of its image's blob: JSON in ASCII, or base64 if shorter."""
    text = json.dumps(metadata)
    encoded = base64.b64encode(metadata_json(metadata)).decode()
    return text if text.isprintable() and len(text) <= len(encoded) else encoded


def read_metadata_header(header: str) -> Any:
    """The JSON of a header of `metadata_header`; raises ValueError for any other."""
    data = header.encode(errors="surrogatepass")
    is_plain = data.startswith(b"{")
    return pydantic_core.from_json(
        data if is_plain else base64.b64decode(data, validate=True)
    )


_JSONValues = dict[str, JsonValue]


def _is_small(metadata: _JSONValues) -> _JSONValues:
    try:
        size = len(metadata_json(metadata))
    except UnicodeEncodeError:
        raise ValueError("contains half of a surrogate pair") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(
            f"is {size:,} bytes of JSON; {MAX_METADATA_BYTES:,} are allowed"
        )
    return metadata


#: The `metadata` of a job: any JSON of its sender, up to a size.
Metadata = Annotated[_JSONValues, AfterValidator(_is_small)]

"""How large a job's message, its metadata and a blob's name may be: the limits of Azure Storage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated
from xml.sax.saxutils import escape

from pydantic import AfterValidator, JsonValue

from imagefleet import errors

#: Azure's limit for the encoded text (XML-escaped UTF-8).
MAX_MESSAGE_BYTES = 65_536

#: `&` becomes `&amp;`.
_MOST_BYTES_A_CHARACTER = 5

#: What workers add to the message of a job with further stages (`imagefleet.job.chain`).
STAGE_BYTES = 512

#: Azure's limit for a blob name, in characters.
MAX_BLOB_NAME = 1024

#: Stored as a header of the image's blob; Azure allows 8 KiB for all headers.
MAX_METADATA_BYTES = 4096

#: Characters that XML 1.0, in which Azure transfers messages, does not allow.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def message_bytes(body: str) -> int:
    """The size of a message as Azure counts it: UTF-8 after XML escaping."""
    return len(escape(body).encode(errors="surrogatepass"))


def fits(body: str) -> bool:
    """True if a queue can carry the message."""
    return message_bytes(body) <= MAX_MESSAGE_BYTES and not _NOT_XML.search(body)


def most_bytes(body: str) -> int:
    """The largest size of a message: the one of a job's first stage leaves room for the others'."""
    is_first = '"then":' in body and '"stage":{' not in body
    return MAX_MESSAGE_BYTES - STAGE_BYTES if is_first else MAX_MESSAGE_BYTES


def checked_messages(bodies: Iterable[str]) -> list[str]:
    """The bodies as a list; raises JobError if a queue cannot carry one of them."""
    checked = list(bodies)
    for body in checked:
        # Short ones, as almost all are, are not encoded to be counted.
        if len(body) * _MOST_BYTES_A_CHARACTER > MAX_MESSAGE_BYTES and (
            size := message_bytes(body)
        ) > (most := most_bytes(body)):
            of_chain = "" if most == MAX_MESSAGE_BYTES else " of a job with further stages"
            raise errors.JobError(
                f"the message has {size:,} bytes; a queue message{of_chain} holds {most:,}"
            )
        if odd := _NOT_XML.search(body):
            raise errors.JobError(
                f"the message holds the character U+{ord(odd[0]):04X}, which queues cannot carry;"
                " escape it in the JSON"
            )
    return checked


def _is_small(metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
    text = json.dumps(metadata)  # in ASCII, as the header has it
    if len(text) > MAX_METADATA_BYTES:
        raise ValueError(f"is {len(text):,} bytes of JSON; {MAX_METADATA_BYTES:,} are allowed")
    if "\\ud" in text:
        try:
            json.dumps(metadata, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair") from None
    return metadata


Metadata = Annotated[dict[str, JsonValue], AfterValidator(_is_small)]
"""The `metadata` of a job: any JSON of its sender, up to a size."""

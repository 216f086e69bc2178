"""The `metadata` of a job: any JSON of its sender, up to a size."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, JsonValue

#: Stored as a header of the image's blob; Azure allows 8 KiB for all headers.
MAX_METADATA_BYTES = 4096


def _is_small(metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
    text = json.dumps(metadata)  # in ASCII, as the header has it
    if len(text) > MAX_METADATA_BYTES:
        raise ValueError(f"is {len(text):,} bytes of JSON; {MAX_METADATA_BYTES:,} are allowed")
    if "\\ud" in text and not _is_encodable(metadata):
        raise ValueError("contains half of a surrogate pair")
    return metadata


def _is_encodable(metadata: dict[str, JsonValue]) -> bool:
    try:
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


Metadata = Annotated[dict[str, JsonValue], AfterValidator(_is_small)]

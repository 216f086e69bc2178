"""The header of a safetensors file: names and shapes, without the weights.

It is untrusted: its size, the number of tensors and their shapes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

#: SD1.5's takes 0.2 MB, and the largest with thumbnails and training notes a few MB. Without a
#: limit, eight stray bytes could ask for all memory.
MAX_HEADER_BYTES = 32 * 2**20

#: The most known are some 10,000.
MAX_TENSORS = 50_000

_MAX_DIMENSIONS = 8

LENGTH_BYTES = 8


class MalformedError(Exception):
    """A file is not a safetensors file."""


class TruncatedError(MalformedError):
    """A file ends before its header does."""


@dataclass(frozen=True, slots=True)
class Header:
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]
    file_bytes: int


def read_header(file: BinaryIO) -> Header:
    """Reads no more than the header; TruncatedError if it is incomplete, MalformedError if none."""
    start = file.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        raise TruncatedError
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise MalformedError
    content = file.read(header_bytes)
    if content[:1] in {b"", b"{"} and len(content) < header_bytes:
        raise TruncatedError
    try:
        entries = json.loads(content)
        metadata = entries.pop("__metadata__", {})
        if len(entries) > MAX_TENSORS:
            raise MalformedError
        ends = [_end(entry) for entry in entries.values()]
        return Header(
            shapes={name: _shape(entry) for name, entry in entries.items()},
            metadata={key: value for key, value in metadata.items() if isinstance(value, str)},
            file_bytes=LENGTH_BYTES + header_bytes + max(ends, default=0),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedError from error


def _end(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    if not _is_size(begin) or not _is_size(end) or begin > end:
        raise MalformedError
    return int(end)


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    shape = entry["shape"]
    if len(shape) > _MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        raise MalformedError
    return tuple(shape)


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63

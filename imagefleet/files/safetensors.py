"""The header of a safetensors file, which is untrusted: names and shapes, without the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, BinaryIO

from pydantic import BaseModel, Field, StrictInt, TypeAdapter

#: The largest have a few MB. Without a limit, eight stray bytes could ask for all memory.
MAX_HEADER_BYTES = 32 * 2**20

#: The most known are some 10,000.
MAX_TENSORS = 50_000

_Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]

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


class _Tensor(BaseModel):
    shape: Annotated[tuple[_Size, ...], Field(max_length=8)]
    data_offsets: tuple[_Size, _Size]


_TENSORS = TypeAdapter(Annotated[dict[str, _Tensor], Field(max_length=MAX_TENSORS)])


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
        tensors = _TENSORS.validate_python(entries)
        if any(tensor.data_offsets[0] > tensor.data_offsets[1] for tensor in tensors.values()):
            raise MalformedError
        return Header(
            shapes={name: tensor.shape for name, tensor in tensors.items()},
            metadata={key: value for key, value in metadata.items() if isinstance(value, str)},
            file_bytes=LENGTH_BYTES
            + header_bytes
            + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0),
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError from error

"""Reads .safetensors files of LoRAs into one buffer each, of which their tensors are views.

The library's own `load` takes a second copy of it all; its `safe_open` maps the file, and a mapped
file that is truncated meanwhile kills the process. Format:
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker.engine.lora import buffers

#: The longest header that is read, as in the library of safetensors.
_MAX_HEADER_BYTES = 100_000_000

_LENGTH_BYTES = 8

_TYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

#: The metadata come first in files of the library's.
_METADATA = re.compile(r'\{\s*"__metadata__"\s*:\s*')

_DECODER = json.JSONDecoder()


class MalformedError(Exception):
    """The file is damaged or incomplete; says how."""


class UnknownTypeError(Exception):
    """A tensor holds numbers of a type that is not read; names the type."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file's three parts."""

    header: str
    """JSON: each tensor's type, shape and place."""
    metadata: Mapping[str, str]
    data: torch.Tensor
    """[bytes]"""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of *data*, or as a copy if it is not aligned."""
        part = data[self.begin : self.end]
        if part.storage_offset() % self.dtype.itemsize:
            part = part.clone()
        return part.view(self.dtype).view(self.shape)


def read(path: Path) -> Content:
    """Reads a whole file; `places` then reads its header.

    Raises:
        OSError: it cannot be read; MalformedError: see there.
    """
    with path.open("rb", buffering=0) as file:
        start = file.read(_LENGTH_BYTES)
        if len(start) < _LENGTH_BYTES:
            raise MalformedError("it ends within its first 8 bytes")
        header_bytes = int.from_bytes(start, "little")
        data_bytes = os.fstat(file.fileno()).st_size - _LENGTH_BYTES - header_bytes
        if header_bytes > _MAX_HEADER_BYTES or data_bytes < 0:
            raise MalformedError("it ends within its header, or begins with something else")
        header = file.read(header_bytes)
        data = buffers.files.take(data_bytes)
        room, at = data.numpy().data, 0
        while read := file.readinto(room[at:]):
            at += read
    try:
        text, metadata = _split(header.decode())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError(f"its header is damaged ({error})") from error
    return Content(text, metadata, data[:at])


def places(header: str, data_bytes: int) -> dict[str, Place]:
    """Each tensor's place by its name, sorted by name.

    Raises:
        MalformedError, UnknownTypeError: see there.
    """
    try:
        entries: dict[str, Any] = json.loads(header)
        found = {name: _place(entry) for name, entry in sorted(entries.items())}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedError(f"its header is damaged ({error})") from error
    end = max((each.end for each in found.values()), default=0)
    if end > data_bytes:
        raise MalformedError(f"it ends {end - data_bytes} bytes before its last tensor does")
    if end < data_bytes:
        raise MalformedError(f"{data_bytes - end} bytes follow its last tensor")
    return found


def _split(header: str) -> tuple[str, dict[str, str]]:
    """The tensors' part of the header and the metadata."""
    metadata: Any = {}
    tensors = header
    if match := _METADATA.match(header):
        metadata, end = _DECODER.raw_decode(header, match.end())
        tensors = "{" + header[end:].lstrip(" ,\n\r\t")
    elif "__metadata__" in header:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", None) or {}
        tensors = json.dumps(entries)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not texts")
    return tensors.rstrip(), dict(metadata)  # padded to multiples of 8 bytes


def _place(entry: Mapping[str, Any]) -> Place:
    if (dtype := _TYPES.get(entry["dtype"])) is None:
        raise UnknownTypeError(repr(entry["dtype"]))
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError("a size is not a whole number")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's shape does not fit its place")
    return Place(dtype, tuple(shape), begin, end)

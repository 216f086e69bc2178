"""Reads a whole .safetensors file into one buffer, of which the tensors are views.

The library's own `load` takes a second copy of it all; its `safe_open` maps the file, and a mapped
file that is truncated meanwhile kills the process. Format:
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from worker.engine.lora.buffers import buffers

#: As the library's.
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


class MalformedError(Exception):
    """The file is damaged or incomplete; says how."""


class UnknownTypeError(Exception):
    """A tensor holds numbers of a type that is not read; names the type."""


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A file's tensors by name, sorted, and its metadata.

    Raises:
        OSError: it cannot be read; MalformedError, UnknownTypeError: see there.
    """
    content = _read_all(path)
    if len(content) < _LENGTH_BYTES:
        raise MalformedError("it ends within its first 8 bytes")
    header_bytes = int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
    begin = _LENGTH_BYTES + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or begin > len(content):
        raise MalformedError("it ends within its header, or begins with something else")
    try:
        header = json.loads(content[_LENGTH_BYTES:begin].numpy().tobytes())
        metadata = _texts(header.pop("__metadata__", None) or {})
        data = content[begin:]
        tensors = {name: _tensor(data, entry) for name, entry in sorted(header.items())}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise MalformedError(f"its header is damaged ({error})") from error
    if end < len(data):
        raise MalformedError(f"{len(data) - end} bytes follow its last tensor")
    return tensors, metadata


def _read_all(path: Path) -> torch.Tensor:
    with path.open("rb", buffering=0) as file:
        content = buffers.take(os.fstat(file.fileno()).st_size)
        room, at = content.numpy().data, 0
        while read := file.readinto(room[at:]):
            at += read
    return content[:at]


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not texts")
    return dict(metadata)


def _tensor(data: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    if (dtype := _TYPES.get(entry["dtype"])) is None:
        raise UnknownTypeError(repr(entry["dtype"]))
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError("a size is not a whole number")
    if end > len(data):
        raise ValueError(f"it ends {end - len(data)} bytes before its last tensor does")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's shape does not fit its place")
    part = data[begin:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)

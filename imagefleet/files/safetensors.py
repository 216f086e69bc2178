"""Files that others write: whether one is whole, and the header of a safetensors file.

The header is untrusted: names and shapes, without the weights.
"""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO

from cachetools import LRUCache
from pydantic import BaseModel, Field, StrictInt, TypeAdapter

from imagefleet.errors import UnsettledFileError

#: Seconds for which nobody must have written a file before it is read: whoever copies one pauses
#: for less.
REST_SECONDS = 3.0

#: Path, modification time in ns, size in bytes and inode: a replaced file is another file.
Identity = tuple[str, int, int, int]

#: Files that had not rested when they were first seen, and when that was.
_unrested = LRUCache[str, tuple[Identity, float]](1_000)

#: The largest have a few MB. Without a limit, eight stray bytes could ask for all memory.
MAX_HEADER_BYTES = 32 * 2**20

#: The most known are some 10,000.
MAX_TENSORS = 50_000

_Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]

LENGTH_BYTES = 8


class UnusableError(Exception):
    """A file cannot be used; the message is a sentence that lacks its subject."""


class MalformedError(ValueError):
    """A file is not a safetensors file."""


class TruncatedError(MalformedError):
    """A file ends before its header does."""


@dataclass(frozen=True, slots=True)
class Header:
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]
    #: Each tensor's type of numbers, and where it begins and ends behind the header.
    places: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    #: Byte offset of the tensors' data in the file.
    data_at: int = 0

    @property
    def file_bytes(self) -> int:
        return self.data_at + max(
            (end for _, _, end in self.places.values()), default=0
        )

    @property
    def integers(self) -> list[str]:
        """The names of tensors of no floating point."""
        return [
            name
            for name, (kind, _, _) in self.places.items()
            if not _FLOATING.match(kind)
        ]


_FLOATING = re.compile(r"B?F\d")


class _Tensor(BaseModel):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Field(max_length=8)]
    data_offsets: tuple[_Size, _Size]


_TENSORS = TypeAdapter(Annotated[dict[str, _Tensor], Field(max_length=MAX_TENSORS)])


def identify(path: Path) -> Identity:
    """Identifies a file's content; raises OSError if it cannot be read."""
    status = path.stat()
    return (str(path), status.st_mtime_ns, status.st_size, status.st_ino)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rested(path: Path) -> Identity:
    """Identifies a file in a folder that others write; UnsettledFileError: it may be half-written.

    A time that a clock set elsewhere has put into the future does not count: such a file has rested
    once this process has seen it unchanged for as long.
    """
    found = identify(path)
    now = time.monotonic()
    if time.time() - found[1] / 1e9 >= REST_SECONDS:
        return found
    seen, since = _unrested.get(found[0], (None, now))
    if seen != found:
        _unrested[found[0]] = found, now
    elif now - since >= REST_SECONDS:
        return found
    raise UnsettledFileError(
        f"{path} was written within the last {REST_SECONDS:g} seconds: it is read once it has"
        " rested for as long"
    )


@contextlib.contextmanager
def whole(identity: Identity) -> Iterator[None]:
    """Reads a file in the block that has this *identity* before and after; for any kind of file.

    Raises UnsettledFileError if it has not, in place of whatever the block made of such a file.
    """
    check_still(identity)
    try:
        yield
    except Exception:
        check_still(identity)
        raise
    check_still(identity)


def check_still(identity: Identity) -> None:
    """Raises UnsettledFileError if a file is no longer what it was."""
    with contextlib.suppress(OSError):
        if identify(Path(identity[0])) == identity:
            return
    raise UnsettledFileError(f"{identity[0]} was written or removed while it was read")


def read_header(file: BinaryIO) -> Header:
    """Reads no more than the header; raises as `header_of` and `parse`."""
    content = header_of(file)
    return parse(content, LENGTH_BYTES + len(content))


def header_of(file: BinaryIO) -> bytes:
    """The header's JSON; TruncatedError if it is incomplete, MalformedError if there is none."""
    start = file.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        raise TruncatedError
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise MalformedError
    content = file.read(header_bytes)
    if len(content) < header_bytes:
        raise TruncatedError if content[:1] in {b"", b"{"} else MalformedError
    return content


def parse(content: bytes | str, data_at: int = 0) -> Header:
    """Reads a header's JSON; raises MalformedError."""
    try:
        entries = json.loads(content)
        metadata = entries.pop("__metadata__", {})
        tensors = _TENSORS.validate_python(entries)
        if any(
            tensor.data_offsets[0] > tensor.data_offsets[1]
            for tensor in tensors.values()
        ):
            raise MalformedError
        return Header(
            {name: tensor.shape for name, tensor in tensors.items()},
            {key: value for key, value in metadata.items() if isinstance(value, str)},
            {
                name: (tensor.dtype, *tensor.data_offsets)
                for name, tensor in tensors.items()
            },
            data_at,
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError from error

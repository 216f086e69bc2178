"""Reads .safetensors files that jobs name into one buffer each, of which their tensors are views.

The library's own `load` takes a second copy of it all; its `safe_open` maps the file, and a mapped
file that is truncated meanwhile kills the process. Format:
https://huggingface.co/docs/safetensors/index#format

The host memory that is read into, and that a GPU copies from, is used again: with some 15 LoRAs of
108 MB a second, on a virtual machine, handing out new pages took longer than everything else.
"""

import contextlib
import json
import math
import mmap
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from cachetools import LRUCache, cached
from torch import Tensor

from imagefleet.errors import TransientError, UnusableFileError
from imagefleet.files.safetensors import (
    Identity,
    MalformedError,
    UnusableError,
    header_of,
    identify,
    parse,
    whole,
)
from imagefleet.telemetry import host
from imagefleet.telemetry.logs import log

#: Tensors by their names.
Tensors = Mapping[str, Tensor]

#: Unused memory that is kept: a share of the machine's, up to what a round of 16 jobs gives back
#: at once with LoRAs of rank 256.
SPARE_SHARE = 1 / 12
MAX_SPARE_BYTES = 4 * 2**30

#: A spare buffer is used for no less than this share of it.
_LEAST_SHARE = 0.5


@dataclass(eq=False)
class _Memory:
    content: npt.NDArray[np.uint8]
    is_locked: bool = False


class Buffers:
    """Lends memory and keeps what comes back; thread-safe."""

    def __init__(self, spare_bytes: int | None = None) -> None:
        """Keeps at most *spare_bytes*; by default a share of the machine's memory."""
        #: True if new memory is page-locked: a GPU copies from it three to ten times as fast.
        self.locks_pages = False
        if spare_bytes is None:
            spare_bytes = int(min(host.memory_bytes() * SPARE_SHARE, MAX_SPARE_BYTES))
        self._spare_bytes = spare_bytes
        self._spare: list[_Memory] = []
        # Memory may come back while this thread holds the lock: the collector runs at any time.
        self._lock = threading.RLock()

    def take(self, size: int) -> Tensor:
        """[size] bytes of any content, which come back once no tensor refers to them."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            fitting = [
                each
                for each in self._spare
                if _LEAST_SHARE * each.content.nbytes <= size <= each.content.nbytes
            ]
            memory = min(fitting, key=lambda each: each.content.nbytes, default=None)
            if memory is not None:
                self._spare.remove(memory)
        if memory is None:
            memory = _allocate(size)
            if self.locks_pages:
                self._lock_pages(memory)
        lent = memory.content[:size]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent)

    @property
    def spare_bytes(self) -> int:
        return sum(each.content.nbytes for each in self._spare)

    def _give_back(self, memory: _Memory) -> None:
        with self._lock:
            self._spare.append(memory)
            while self.spare_bytes > self._spare_bytes:
                oldest = self._spare.pop(0)
                if oldest.is_locked:
                    _cuda().cudaHostUnregister(oldest.content.ctypes.data)

    def _lock_pages(self, memory: _Memory) -> None:
        """Tries to: some systems let a process lock little memory, or none."""
        size = memory.content.nbytes
        error = int(_cuda().cudaHostRegister(memory.content.ctypes.data, size, 0))
        memory.is_locked = not error
        if error:
            self.locks_pages = False
            log.info(
                "copies to the GPU are from pageable memory from now on, which is slower: this"
                f" system does not lock {size / 10**6:.0f} MB more (CUDA error {error})",
                action="pages_not_locked",
            )


def _allocate(size: int) -> _Memory:
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):
        # On Linux, unless it has been built without them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _Memory(np.frombuffer(memory, np.uint8))


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


#: The buffers of this process: what files hold, and what is copied to a device.
files = Buffers()
packs = Buffers()

#: Buffers of a checkpoint's layers without room on the device: they stay as long as their engine.
layers = Buffers(spare_bytes=0)


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


@contextlib.contextmanager
def named(file: str) -> Iterator[None]:
    """Raises what is wrong with a *file*, such as "the LoRA 'x'", as an error that names it.

    Raises UnusableFileError if it is not what it should be, or not for this model, and
    TransientError if it could not be read, or was evicted from the disk meanwhile.
    """
    try:
        yield
    except OSError as error:
        raise TransientError(
            f"{file} cannot be read: {error.strerror or error}"
        ) from error
    except UnusableError as error:
        raise UnusableFileError(f"{file} {error}") from error


@dataclass(frozen=True)
class Content:
    #: JSON: each tensor's type, shape and place.
    header: str
    metadata: Mapping[str, str]
    #: [bytes]
    data: Tensor


@dataclass(frozen=True)
class Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, data: Tensor) -> Tensor:
        """The tensor as a view of *data*, or as a copy if it is not aligned."""
        part = data[self.begin : self.end]
        if part.storage_offset() % self.dtype.itemsize:
            part = part.clone()
        return part.view(self.dtype).view(self.shape)


def read(path: Path, identity: Identity | None = None) -> Content:
    """Reads a whole file; `places` then reads its header. For `named`, as all that follows.

    *identity* is what the file must be; by default, what it is when it is opened. Raises
    UnsettledFileError if it is another, or is written meanwhile.
    """
    with whole(identity or identify(path)), path.open("rb", buffering=0) as file:
        try:
            text, metadata = _split(header_of(file).decode())
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _incomplete("its header is damaged or cut off") from error
        data = files.take(os.fstat(file.fileno()).st_size - file.tell())
        room = data.numpy().data
        at = 0
        while read := file.readinto(room[at:]):
            at += read
    return Content(text, metadata, data[:at])


def places(header: str, data_bytes: int) -> dict[str, Place]:
    """Each tensor's place by its name, sorted by name."""
    try:
        read = parse(header)
    except MalformedError as error:
        raise _incomplete("its header is damaged") from error
    found = {}
    for name, (kind, begin, end) in sorted(read.places.items()):
        if (dtype := _TYPES.get(kind)) is None:
            raise UnusableError(
                f"holds numbers of the type {kind!r}, which is not supported"
            )
        found[name] = Place(dtype, read.shapes[name], begin, end)
        if end - begin != math.prod(read.shapes[name]) * dtype.itemsize:
            raise _incomplete("a tensor's shape does not fit its place")
    if (end := read.file_bytes) > data_bytes:
        raise _incomplete(
            f"it ends {end - data_bytes} bytes before its last tensor does"
        )
    if end < data_bytes:
        raise _incomplete(f"{data_bytes - end} bytes follow its last tensor")
    return found


def tensors_of(identity: Identity) -> Tensors:
    """A file's tensors by name, as views of one buffer."""
    content = read(Path(identity[0]), identity)
    return {
        name: place.of(content.data)
        for name, place in places(content.header, len(content.data)).items()
    }


def is_finite(tensor: Tensor) -> bool:
    """True if a tensor holds neither NaN nor infinity."""
    if not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch finds no extremes of 8-bit numbers
    # NaN counts as the smallest and as the largest.
    smallest, largest = torch.aminmax(tensor)
    return bool(smallest.isfinite()) and bool(largest.isfinite())


def find_damaged(tensors: Tensors) -> str | None:
    """The name of the first tensor that holds NaN or infinity; None if none does."""
    damaged = (name for name, tensor in tensors.items() if not is_finite(tensor))
    return next(damaged, None)


def refuse_damaged(tensors: Tensors) -> None:
    if (name := find_damaged(tensors)) is not None:
        number_type = str(tensors[name].dtype).removeprefix("torch.")
        raise UnusableError(
            f"holds NaN, infinity or numbers too large for {number_type} in {name}"
        )


def _incomplete(why: str) -> UnusableError:
    return UnusableError(f"is not a complete .safetensors file: {why}")


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


Value = TypeVar("Value")


class ReadOnce(Generic[Value]):
    """The values used last, each read once for all threads; thread-safe.

    Of threads that wait for one that cannot be read, each tries to.
    """

    def __init__(self, room: int, size: Callable[[Value], int] = lambda _: 1) -> None:
        """*room*: the most of the *size* of all values; a larger one is read each time."""
        #: Values that were here ('hit') and were read ('miss').
        self.lookups: Counter[str] = Counter()
        self._lock = threading.Condition()
        keep = cached(LRUCache(room, size), lambda key, _: key, condition=self._lock)
        self._find = keep(lambda _, read: read())

    def get(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """The cached value, or what *read* returns; waits for a thread that is reading it."""
        result = "hit"

        def noted() -> Value:
            nonlocal result
            result = "miss"
            return read()

        try:
            found: Value = self._find(key, noted)
        finally:
            with self._lock:
                self.lookups[result] += 1
        return found

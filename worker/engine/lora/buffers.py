"""Host memory that a GPU copies from, used again: a new page is zeroed at its first use.

A LoRA of rank 128 takes 108 MB as a file and 108 MB packed. With some 15 of them a second, on a
virtual machine, handing out new pages took longer than everything else.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from imagefleet.telemetry import host

log = logging.getLogger(__name__)

#: Unused memory that is kept: a share of the machine's, up to what a round of 16 jobs gives back
#: at once with LoRAs of rank 256.
SPARE_SHARE, MAX_SPARE_BYTES = 1 / 12, 4 * 2**30

#: A spare buffer is used for no less than this share of it.
_LEAST_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _Memory:
    content: npt.NDArray[np.uint8]
    is_locked: bool = False


class Buffers:
    """Lends memory and keeps what comes back; thread-safe."""

    def __init__(
        self, spare_bytes: int | None = None, *, lockable_bytes: int | None = None
    ) -> None:
        """*spare_bytes* are kept, and as many *lockable_bytes* may be locked, if not given."""
        self.locks_pages = False
        """Whether new memory is locked: a GPU copies from it three to ten times as fast."""
        self._spare_bytes = _default_spare_bytes() if spare_bytes is None else spare_bytes
        self._lockable_bytes = self._spare_bytes if lockable_bytes is None else lockable_bytes
        self._spare: list[_Memory] = []
        self._locked_bytes = 0
        # Memory may come back while this thread holds the lock: the collector runs at any time.
        self._lock = threading.RLock()

    def take(self, size: int) -> torch.Tensor:
        """[size] bytes of any content, which come back once no tensor refers to them."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            memory = self._find(size)
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

    def _find(self, size: int) -> _Memory | None:
        fitting = [
            each
            for each in self._spare
            if _LEAST_SHARE * each.content.nbytes <= size <= each.content.nbytes
        ]
        return min(fitting, key=lambda each: each.content.nbytes, default=None)

    def _give_back(self, memory: _Memory) -> None:
        with self._lock:
            self._spare.append(memory)
            while self.spare_bytes > self._spare_bytes:
                self._unlock_pages(self._spare.pop(0))

    def _lock_pages(self, memory: _Memory) -> None:
        """Tries to: some systems let a process lock little memory, or none."""
        size = memory.content.nbytes
        with self._lock:
            if self._locked_bytes + size > self._lockable_bytes:
                return
            self._locked_bytes += size
        error = int(_cuda().cudaHostRegister(memory.content.ctypes.data, size, 0))
        memory.is_locked = not error
        if error:
            with self._lock:
                self._locked_bytes -= size
            self.locks_pages = False
            log.info(
                "copies to the GPU are from pageable memory: this system locks no more than %d MB"
                " (CUDA error %d)",
                self._locked_bytes // 10**6,
                error,
                extra={"action": "pages_not_locked"},
            )

    def _unlock_pages(self, memory: _Memory) -> None:
        if memory.is_locked:
            _cuda().cudaHostUnregister(memory.content.ctypes.data)
            memory.is_locked = False
            self._locked_bytes -= memory.content.nbytes


def _allocate(size: int) -> _Memory:
    memory = mmap.mmap(-1, size)
    with suppress(AttributeError, OSError):  # on Linux, unless it has been built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _Memory(np.frombuffer(memory, np.uint8))


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _default_spare_bytes() -> int:
    return int(min(host.memory_bytes() * SPARE_SHARE, MAX_SPARE_BYTES))


#: The buffers of this process: what files hold, and what is copied to a device.
files, packs = Buffers(), Buffers()

#: Buffers of a checkpoint's layers without room on the device: they stay as long as their engine.
layers = Buffers(spare_bytes=0, lockable_bytes=sys.maxsize)

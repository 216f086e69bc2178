"""Host memory for LoRAs, used again: of new memory each page is zeroed at its first use.

A LoRA of rank 128 takes 108 MB as a file and 108 MB packed. With some 15 of them a second, on a
virtual machine, handing out new pages took longer than everything else.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch

#: Unused memory that is kept: files that are being read, and a few packed LoRAs.
SPARE_BYTES = 2**30

#: A spare buffer is used for no less than this share of it.
_LEAST_SHARE = 0.5

_Memory = npt.NDArray[np.uint8]


class Buffers:
    """Lends memory and keeps what comes back; thread-safe."""

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._spare: list[_Memory] = []
        # Memory may come back while this thread holds the lock: the collector runs at any time.
        self._lock = threading.RLock()

    def take(self, size: int) -> torch.Tensor:
        """[size] bytes of any content, which come back once no tensor refers to them."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            fitting = [
                each for each in self._spare if _LEAST_SHARE * len(each) <= size <= len(each)
            ]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._spare = [each for each in self._spare if each is not memory]
        if memory is None:
            memory = np.empty(size, np.uint8)
        lent = memory[:size]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent)

    @property
    def spare_bytes(self) -> int:
        return sum(each.nbytes for each in self._spare)

    def _give_back(self, memory: _Memory) -> None:
        with self._lock:
            self._spare.append(memory)
            while self.spare_bytes > self._spare_bytes:
                del self._spare[0]


#: Of this process.
buffers = Buffers()

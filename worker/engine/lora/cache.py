"""LoRA files in memory: each read once for all threads, the least recently used dropped.

Not cachetools: where one read fails, all the threads that wait for it must fail with it, or each
would read the bad file again.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future

from worker.engine import contract
from worker.engine.lora import file as lora_file
from worker.engine.lora.names import Layers


class LoraCache:
    """An LRU cache of *cache_bytes*; thread-safe."""

    def __init__(self, layers: Layers, cache_bytes: int) -> None:
        self.lookups: Counter[str] = Counter()
        self._layers = layers
        self._cache_bytes = cache_bytes
        self._files: OrderedDict[lora_file.Identity, Future[lora_file.LoraFile]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, lora: contract.Lora) -> lora_file.LoraFile:
        """Reads a file, unless it is cached or another thread is reading it.

        Raises:
            UnusableFileError: it is not a LoRA, or not one for this model.
            TransientError: it could not be read.
        """
        identity = lora_file.identify(lora)
        with self._lock:
            future = self._files.get(identity)
            is_new = future is None
            if future is None:
                future = self._files[identity] = Future()
            self._files.move_to_end(identity)
            self.lookups["miss" if is_new else "hit"] += 1
        if is_new:
            self._fill(future, identity, lora)
        return future.result()

    def _fill(
        self,
        future: Future[lora_file.LoraFile],
        identity: lora_file.Identity,
        lora: contract.Lora,
    ) -> None:
        try:
            future.set_result(lora_file.read_lora(lora, identity, self._layers))
        except BaseException as error:  # noqa: BLE001 - other threads wait for it
            with self._lock:
                del self._files[identity]
            future.set_exception(error)
            return
        with self._lock:
            self._evict()

    def _evict(self) -> None:
        read = {key: future for key, future in self._files.items() if future.done()}
        total = sum(future.result().size_bytes for future in read.values())
        for identity, future in read.items():
            if total <= self._cache_bytes:
                return
            total -= future.result().size_bytes
            del self._files[identity]

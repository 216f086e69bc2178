"""Compiles on a thread of its own, while the engine's thread runs the same layers uncompiled.

That both touch torch is safe: one graph at a time is traced, and the engine's thread takes it up
before the next begins. Tracing reads shapes and types of tensors, never their contents. Torch's
modes and device belong to a thread, and what it sets for the whole process while it compiles is
hidden from other threads (`compile._unnoticed`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from worker.engine.kernels.compile import Compiled, compiling_elsewhere

#: The thread's name; see `worker.gpu_thread.THREAD_NAME`, which it begins with.
THREAD_NAME = "engine compiler"

Around = Callable[[str], AbstractContextManager[None]]
"""Given a graph's name; what it returns is entered while that graph is compiled, on its thread."""


def nothing_around(_name: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class BackgroundTracer:
    """Traces one function at a time; all methods are for the engine's thread."""

    def __init__(self, device: torch.device, around: Around = nothing_around) -> None:
        self.around = around
        self._device = device
        self._compiled: Compiled | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """True if what `begin` was given last is traced, for `result`."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, compiled: Compiled) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("one function is traced at a time")
        self._compiled, self._error = compiled, None
        compiling_elsewhere.set()
        # A daemon: a compiler cannot be interrupted, and must not keep a process from its end.
        self._thread = threading.Thread(
            target=self._trace,
            args=(compiled, torch.get_num_threads()),
            name=THREAD_NAME,
            daemon=True,
        )
        self._thread.start()

    def result(self) -> None:
        """Takes the outcome of a traced function, which may have failed without an exception.

        Raises Exception if the GPU is broken, or its memory full.
        """
        self._thread = self._compiled = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Has the thread end at its next chance; its function is not used any more."""
        if self._compiled is not None:
            self._compiled.abandon()

    def _trace(self, compiled: Compiled, threads: int) -> None:
        on_gpu = self._device.type == "cuda"
        try:
            torch.set_num_threads(threads)  # a compiled function is bound to their number
            on_device = torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext()
            with on_device, self.around(compiled.name):
                compiled.trace()
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        finally:
            compiling_elsewhere.clear()

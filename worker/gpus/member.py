"""One worker of several on a machine: what its parent told it, and when it has to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable

from pydantic import BaseModel

from worker.settings import WorkerSettings

#: Set by the parent; not a setting, and not passed on.
VARIABLE = "_IMAGEFLEET_GPU"

#: What the parent sends. Not signals, which a supervisor may send to the parent and to its
#: children: the second one would count as another.
STOP, HURRY = b"stop\n", b"hurry\n"

#: Seconds to hand jobs back after the parent's death, which takes ten seconds if the storage does
#: not answer. A new parent may have started on the same GPU already.
LAST_SECONDS = 15.0


class Assignment(BaseModel):
    """The worker that a process is; *control* is its end of a socket to the parent."""

    control: int
    gpu: str
    name: str
    instance: str
    price_per_hour: float | None = None
    share: float = 0.0
    """The worker's place among the machine's workers, from 0 to 1."""


class Member:
    """The parent as its worker sees it."""

    def __init__(self, assignment: Assignment) -> None:
        self.gpu = assignment.gpu
        self.instance = assignment.instance
        self.share = assignment.share
        self._assignment = assignment
        self._control = socket.socket(fileno=assignment.control)
        self._control.set_inheritable(False)
        self._lock = threading.Lock()
        self._received: list[bool] = []
        self._on_word: Callable[[bool], object] | None = None
        # A thread: it also notices the parent's death while the event loop is busy or not there.
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Member | None:
        """This process as its parent's member; None: it has no parent, as most workers."""
        given = os.environ.pop(VARIABLE, None)
        return None if given is None else cls(Assignment.model_validate_json(given))

    def settings(self, settings: WorkerSettings) -> WorkerSettings:
        """The settings of this worker by those of the machine."""
        return settings.model_copy(
            update={
                "name": self._assignment.name,
                "price_per_hour": self._assignment.price_per_hour,
                "device": "cpu" if settings.device == "cpu" else "cuda",
                "host": "127.0.0.1",
                "port": 0,
            }
        )

    def serves(self, port: int) -> None:
        """Reports the port of the probes and metrics."""
        with contextlib.suppress(OSError):  # the parent is gone
            self._control.sendall(b"%d\n" % port)

    def listen(self, loop: asyncio.AbstractEventLoop, on_word: Callable[[bool], object]) -> None:
        """Calls *on_word* in *loop* for each word of the parent: True to end at once."""

        def deliver(hurries: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_word, hurries)

        with self._lock:
            self._on_word = deliver
            received, self._received = self._received, []
        for hurries in received:
            deliver(hurries)

    def _read(self) -> None:
        with self._control, contextlib.suppress(OSError), self._control.makefile("rb") as words:
            for word in words:
                self._deliver(hurries=word == HURRY)
        self._deliver(hurries=True)
        threading.Event().wait(LAST_SECONDS)
        os._exit(1)

    def _deliver(self, *, hurries: bool) -> None:
        with self._lock:
            if self._on_word is None:
                self._received.append(hurries)
            else:
                self._on_word(hurries)

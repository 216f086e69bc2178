"""The compiler: a process of its own, so that drawing keeps the interpreter's lock to itself.

It has no weights and hardly any of the GPU's memory: what it compiles is described to it
(`description.py`), and it leaves a package (`package.py`). It ends with the process that began it,
however that ends: it reads from a pipe that the system closes then.
"""

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, cast

from worker.engine import phases

#: The drawing process goes first, of all that wants the host's processors.
_NICENESS = 10

_PROGRAM = f"""
from {__name__} import serve
from worker.engine import load
serve(load.import_libraries)
"""


class CompileError(Exception):
    """A call could not be compiled."""


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    orders: IO[bytes]
    replies: IO[bytes]


class Compiler:
    """Compiles one described call at a time, in a child process that stays; for one thread."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts the child ahead of its first call: it imports for ten seconds and more."""
        if self._child is not None and self._child.process.poll() is None:
            return
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TRITON_DISABLE_LINE_INFO": "1",  # a third of a package
            },
            start_new_session=True,  # Ctrl-C is its parent's
        )
        orders = process.stdin
        replies = process.stdout
        self._child = _Child(process, cast(IO[bytes], orders), cast(IO[bytes], replies))

    def begin(self, content: bytes, target: Path) -> None:
        """Has the package of a described call written; one at a time."""
        self.start()
        orders = self._begun.orders
        with contextlib.suppress(BrokenPipeError):  # `end` says so
            pickle.dump((content, target), orders)
            orders.flush()

    def is_done(self, seconds: float = 0.0) -> bool:
        """True once the call is compiled, or cannot be; waits for so many *seconds*."""
        return bool(select.select([self._begun.replies], [], [], seconds)[0])

    def end(self) -> None:
        """Waits for the call that was begun; raises CompileError if it could not be compiled."""
        child = self._begun
        try:
            problem, taken = pickle.load(child.replies)  # noqa: S301 - of our own child
            for phase, seconds in taken.items():
                phases.seconds[phase] += seconds
        except EOFError:
            code = child.process.wait()
            self.close()
            problem = f"the compiler ended with {code}"
            if code == -signal.SIGKILL:
                problem += ": perhaps the machine's memory was full"
        if problem is not None:
            raise CompileError(problem)

    def close(self) -> None:
        """Ends the child at once, with all of its own."""
        child = self._child
        self._child = None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        for pipe in (child.orders, child.replies):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    @property
    def _begun(self) -> _Child:
        if self._child is None:
            raise RuntimeError("no call was begun")
        return self._child


def serve(prepare: Callable[[], None]) -> None:
    """The child: compiles what it reads until its parent is gone, once it is *prepare*d."""
    os.nice(_NICENESS)
    orders = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    inbox: list[tuple[bytes, Path]] = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                inbox.append(pickle.load(orders))  # noqa: S301 - of our own parent
                arrived.release()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    prepare()
    import torch._inductor.compile_fx  # noqa: F401 - the first call would

    from worker.engine.kernels import package

    while True:
        arrived.acquire()
        content, target = inbox.pop(0)
        problem: str | None = None
        before = phases.seconds.copy()
        try:
            package.compile_package(content, target)
        except BaseException as error:  # noqa: BLE001 - a compiler may raise anything
            problem = f"{error!r:.300}"
        taken = {each: phases.seconds[each] - before[each] for each in before}
        pickle.dump((problem, taken), replies)
        replies.flush()

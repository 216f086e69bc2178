"""Seconds of each start-up phase, until a process draws at full speed.

Phases overlap: libraries are imported while the model comes, and compiling runs beside the drawing.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Literal, get_args

#: `load`: all until the engine is there but the weights' `move` to the GPU; `kernels`: waiting for
#: those that are being fetched.
Phase = Literal[
    "import",
    "download",
    "load",
    "move",
    "kernels",
    "trace",
    "compile",
    "autotune",
    "capture",
]

#: Of this process so far.
seconds: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)

_thread = threading.local()


@contextlib.contextmanager
def timed(phase: Phase) -> Iterator[None]:
    """Counts the block's time as a phase's, without that of phases inside it."""
    began_at = time.monotonic()
    before = getattr(_thread, "inside", 0.0)
    _thread.inside = 0.0
    try:
        yield
    finally:
        whole = time.monotonic() - began_at
        seconds[phase] = round(seconds[phase] + whole - _thread.inside, 3)
        _thread.inside = before + whole


def described() -> str:
    """The phases that took time, as in 'import 6.2 s, load 4.1 s'."""
    return ", ".join(
        f"{phase} {each:.1f} s" for phase, each in seconds.items() if round(each, 1)
    )

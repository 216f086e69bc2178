"""The time since this machine started, which nobody sets and all of its processes share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

#: A clock that goes on while the machine sleeps, as leases do. macOS has no other that does.
CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def seconds() -> float:
    return time.clock_gettime(CLOCK)


def boot_id() -> str | None:
    """The same for every process until the machine restarts; None where there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def steady_clock() -> Callable[[], float]:
    """The time of day as it is now (Unix seconds), going on whatever it is set to later."""
    ahead = time.time() - seconds()
    return lambda: ahead + seconds()

"""This machine: the memory of it and of the container that a worker is in, and its uptime."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

#: A container's, in version 2 of Linux' control groups.
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Bytes of memory of the machine, in use or not."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
        found = min(found, _read("memory.max"))
    return found


def free_memory_bytes() -> int:
    """Bytes of memory that are free or can be freed; 0 if that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (line,) = [each for each in lines if each.startswith("MemAvailable:")]
        free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 0
    with contextlib.suppress(OSError, ValueError):  # no such files, or no limit
        limit = _read("memory.max")
        used = _read("memory.current")
        stat = (_CONTROL_GROUP / "memory.stat").read_text(encoding="ascii")
        of_files = sum(
            int(size)
            for name, size in (line.split() for line in stat.splitlines())
            if name in ("active_file", "inactive_file")
        )
        free = min(free, limit - used + of_files)
    return free


def _read(name: str) -> int:
    return int((_CONTROL_GROUP / name).read_text(encoding="ascii"))


def uptime() -> float:
    """Seconds since this machine started, which nobody sets and all of its processes share."""
    # Also while the machine sleeps. macOS has no other clock that does.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def steady_clock() -> Callable[[], float]:
    """The time of day as it is now (Unix seconds), going on whatever it is set to later."""
    ahead = time.time() - uptime()
    return lambda: ahead + uptime()

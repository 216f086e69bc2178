"""The processor cores that a worker may count on, beside the other workers of its machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

#: A container's limit of processor time: microseconds, of so many.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def threads(processes: int) -> str:
    """Torch's threads for one of so many processes: OMP_NUM_THREADS, where that is set."""
    # With every core for each, they would wait for each other.
    return os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // processes)))


def _cores() -> int:
    """Those of this process: by its affinity, and by its container's limit."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file here, or "max": no limit
        return cores

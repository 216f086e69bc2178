"""The processor cores that a worker may count on, beside the other workers of its machine."""

from __future__ import annotations

import os

from imagefleet import concurrency


def threads(processes: int) -> str:
    """Torch's threads for one of so many processes: OMP_NUM_THREADS, where that is set."""
    # With every core for each, they would wait for each other.
    return os.environ.get("OMP_NUM_THREADS", str(max(1, concurrency.cores() // processes)))

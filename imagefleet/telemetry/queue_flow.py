"""How fast a queue fills or empties, from measurements of its depth."""

from __future__ import annotations

import math
from collections import deque

#: Long enough to even out Azure's approximate counts, short enough to show a change.
WINDOW_SECONDS = 300.0


class QueueFlow:
    """The rate of change of a queue's depth over the last minutes."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._samples: deque[tuple[float, int]] = deque()

    def add_sample(self, at: float, messages: int) -> None:
        """*at*: monotonic seconds."""
        self._samples.append((at, messages))
        while len(self._samples) > 1 and at - self._samples[1][0] >= self._window_seconds:
            self._samples.popleft()

    @property
    def net_per_second(self) -> float | None:
        """Arrivals minus completions; None before the second sample."""
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    @property
    def seconds_to_empty(self) -> float | None:
        """Time left at the current rate: 0 when empty, infinite while it does not shrink."""
        messages, net = self._samples[-1][1], self.net_per_second
        if messages == 0:
            return 0.0
        if net is None:
            return None
        return messages / -net if net < 0 else math.inf

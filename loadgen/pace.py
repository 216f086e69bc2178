"""How fast a load is, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

#: The rate is that of the last minute: a storage that asks to slow down shows at once.
SECONDS = 60.0

#: Moments within it that are kept.
_MOMENTS = 60


def seconds_left(total: int | None, confirmed: int, per_second: float) -> float | None:
    if total is None:
        return None
    if total <= confirmed:
        return 0.0
    return round((total - confirmed) / per_second, 1) if per_second > 0 else None


def duration(seconds: float) -> str:
    """`2 h 05 min`, `12 min`, `40 s`."""
    minutes = round(seconds / 60)
    if minutes >= 60:  # noqa: PLR2004 - an hour
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"  # noqa: PLR2004 - shorter


class Pace:
    """The rate of a load that has *confirmed* positions."""

    def __init__(self, confirmed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments = deque([(clock(), confirmed)])
        self._now = confirmed

    def note(self, confirmed: int) -> None:
        self._now = confirmed
        now = self._clock()
        if now - self._moments[-1][0] >= SECONDS / _MOMENTS:
            self._moments.append((now, confirmed))
        while now - self._moments[0][0] > SECONDS and len(self._moments) > 1:
            self._moments.popleft()

    @property
    def per_second(self) -> float:
        began, first = self._moments[0]
        return (self._now - first) / max(self._clock() - began, 1e-6)

    def left(self, total: int | None) -> float | None:
        return seconds_left(total, self._now, self.per_second)

"""Whether the time of a call is linear in the size of its input, on any machine, however busy."""

import time
from collections.abc import Callable

#: The smaller input is so many times smaller: linear work takes it so many times less time, and
#: quadratic work as many times less again.
_TIMES = 8

#: Between the two.
_MOST_TIMES = 3 * _TIMES

#: Shorter calls take what they take by chance.
_LEAST_SECONDS = 0.001


def assert_linear(call: Callable[[int], object], size: int) -> None:
    """Compares this thread's processor times for *size* and for an eighth of it.

    What *call* does may not be remembered from one call to the next.
    """
    shortest = min(_seconds(call, size // _TIMES) for _ in range(3))
    few = max(shortest, _LEAST_SECONDS)
    limit = _MOST_TIMES * few
    many = _seconds(call, size)
    if many > limit:  # the memory may have been collected meanwhile
        many = _seconds(call, size)
    assert many <= limit, (
        f"{_TIMES} times as much takes {many / few:.0f} times as long: {many:.3g} s"
    )


def _seconds(call: Callable[[int], object], size: int) -> float:
    began_at = time.thread_time()
    call(size)
    return time.thread_time() - began_at

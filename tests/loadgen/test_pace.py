from __future__ import annotations

import pytest

from loadgen import load as pace
from loadgen.load import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_that_of_the_last_minute() -> None:
    clock = Clock()
    measured = Pace(0, clock)
    for second in range(1, 301):
        clock.now += 1
        per_second = 1_000 if second <= 200 else 10
        measured.note(measured._now + per_second)
    assert measured.per_second == pytest.approx(10, rel=0.05)
    assert measured.left(201_000 + 3_600) == pytest.approx(360, rel=0.05)
    assert len(measured._moments) <= 62, "an hour of it takes no more memory than a minute"


def test_what_earlier_runs_have_sent_is_not_of_this_rate() -> None:
    clock = Clock()
    measured = Pace(9_000_000, clock)
    clock.now += 10
    measured.note(9_001_000)
    assert measured.per_second == pytest.approx(100)
    assert measured.left(10_000_000) == pytest.approx(9_990)


@pytest.mark.parametrize(
    ("total", "confirmed", "per_second", "left"),
    [(None, 10, 1.0, None), (10, 10, 0.0, 0.0), (10, 5, 0.0, None), (10, 5, 2.0, 2.5)],
)
def test_the_time_left_is_known_or_not(
    total: int | None, confirmed: int, per_second: float, left: float | None
) -> None:
    assert pace.seconds_left(total, confirmed, per_second) == left


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (120, "2 min"), (3_599, "1 h 00 min"), (7_500, "2 h 05 min")],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert pace.duration(seconds) == text

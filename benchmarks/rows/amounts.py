"""What a measurement's images amount to per second: pixels, calls or rows, whatever their sizes."""

from collections.abc import Callable, Sequence

import numpy as np

from evaluation.bench.work import Rate
from worker.engine.contract import ImageRequest


def per_second(rate: Rate, amount_of: Callable[[ImageRequest], float]) -> float:
    """The amount of the images of a rate's whole rounds; of unlike ones by the line through all.

    Rounds of unlike images overlap, so that it matters which of them ends last.
    """
    amounts = [amount_of(request) for _, request in rate.drawn]
    counted = amounts[1 : 1 + rate.images]
    if len(set(counted)) > 1:
        return _slope([finished_at for finished_at, _ in rate.drawn], amounts)
    return sum(counted) / rate.seconds


def _slope(finished_at: Sequence[float], amounts: Sequence[float]) -> float:
    """The slope of the line nearest to the total amount over time, by least squares.

    Through the middle of each step of that stairway: of three sizes by turns over 16 seconds, it is
    wrong by 0.6 %, and by 4 % the total between the first and the last step.
    """
    times, steps = np.unique(np.asarray(finished_at), return_inverse=True)
    rises = np.bincount(steps, weights=np.asarray(amounts, dtype=float))
    middles = np.cumsum(rises) - rises / 2
    slope, _ = np.polyfit(times - times[0], middles, 1)
    return float(slope)

"""Noise of SDE samplers: increments of a Brownian motion over sigma, from an image's seed alone.

The motion is that of torchsde's `BrownianTree` (Li et al. 2020, "Scalable Gradients for Stochastic
Differential Equations", algorithm 3), which k-diffusion and AUTOMATIC1111 take: an interval's
increment is split at its middle, with noise whose seed follows from its place in the tree, until
the points asked for are reached. Points are rounded to six digits.

Threads draw while the engine's calls the GPU. What is computed here is computed in place, by numpy:
torch would share a large tensor out to more threads, and fresh memory costs more than the sums.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_DIGITS = 6
_POOL_SIZE = 24

#: The constants of numpy's `SeedSequence`, whose results numpy promises to keep.
_INIT_A = 0x43B0D7E5
_MULT_A = 0x931E8875
_INIT_B = 0x8B51F9DD
_MULT_B = 0x58F38DED
_MIX_LEFT = 0xCA01F9DD
_MIX_RIGHT = 0x4973F715
_WORD = 0xFFFFFFFF

_Numbers = npt.NDArray[np.float32]

#: Two ends, such as the sigmas that a step begins and ends at.
Interval = tuple[float, float]


#: Parts of intervals: the interval's number, and the part's ends.
_Parts = Sequence[tuple[int, float, float]]


class _Node(NamedTuple):
    """A node of the tree: its ends, its place, and the motion's increment over it."""

    start: float
    end: float
    place: int
    depth: int
    increment: _Numbers
    #: The parts of intervals in it.
    wanted: _Parts


class BrownianTree:
    """One image's Brownian motion between two sigmas."""

    def __init__(
        self, seed: int, span: Interval, draw: Callable[[int], Tensor]
    ) -> None:
        """*span*: the smallest and the largest sigma; *draw* makes normal noise from a seed."""
        sequence = np.random.SeedSequence(seed, pool_size=_POOL_SIZE)
        self._mixed = int(sequence.pool[0])
        self._draw = draw
        self._start, self._end = (round(sigma, _DIGITS) for sigma in span)
        (first_word,) = sequence.generate_state(1)
        deviation = math.sqrt(span[1] - span[0])
        self._whole: _Numbers = (draw(int(first_word)) * deviation).numpy()

    def noise(self, intervals: Sequence[Interval]) -> list[Tensor]:
        """The increments from a sigma down to a following one, each scaled to variance 1.

        Intervals that are asked for together share what is drawn on the way to their ends.
        """
        totals: list[_Numbers | None] = [None] * len(intervals)
        ends = [
            (self._clamped(following), self._clamped(sigma))
            for sigma, following in intervals
        ]
        wanted = [
            (at, start, end) for at, (start, end) in enumerate(ends) if start < end
        ]
        waiting = [_Node(self._start, self._end, 0, 0, self._whole.copy(), wanted)]
        while waiting:  # from the left, in whose order torchsde adds the nodes up
            node = waiting.pop()
            inside = []
            for at, start, end in node.wanted:
                if (start, end) != (node.start, node.end):
                    inside.append((at, start, end))
                elif (total := totals[at]) is None:
                    totals[at] = node.increment.copy()
                else:
                    total += node.increment
            if inside:
                waiting += self._split(node, inside)
        noise = []
        for total, (sigma, following) in zip(totals, intervals, strict=True):
            increment = np.zeros_like(self._whole) if total is None else total
            # By torch as there: on some processors its root is not the nearest number.
            increment /= -(torch.tensor(sigma) - torch.tensor(following)).sqrt().numpy()
            noise.append(torch.from_numpy(increment))
        return noise

    def _split(self, node: _Node, inside: _Parts) -> list[_Node]:
        """The right and the left half, if anything is wanted of it; the node's array is used up."""
        start, end, place, depth, increment, _ = node
        middle = round(0.5 * (end + start), _DIGITS)
        before = middle - start
        after = end - middle
        scale = 1 / (end - start)
        half: _Numbers = self._draw(self._seed_at(place, depth)).numpy()
        half *= math.sqrt(before * after * scale)
        mean = increment * before
        mean *= scale
        half += mean
        increment -= half
        right = [
            (at, max(low, middle), high) for at, low, high in inside if high > middle
        ]
        left = [
            (at, low, min(high, middle)) for at, low, high in inside if low < middle
        ]
        halves = (
            _Node(middle, end, 2 * place + 1, depth + 1, increment, right),
            _Node(start, middle, 2 * place, depth + 1, half, left),
        )
        return [each for each in halves if each.wanted]

    def _clamped(self, sigma: float) -> float:
        return round(min(max(sigma, self._start), self._end), _DIGITS)

    def _seed_at(self, place: int, depth: int) -> int:
        """The first word of the seed's `SeedSequence` with this spawn key.

        Of the pool only the first word is mixed on, in a tenth of the time.
        """
        mixed = self._mixed
        constant = _INIT_A * pow(_MULT_A, _POOL_SIZE**2, 2**32)
        words = (place & _WORD, place >> 32, depth) if place >> 32 else (place, depth)
        for word in words:
            hashed = (word ^ constant & _WORD) * constant * _MULT_A & _WORD
            mixed = _MIX_LEFT * mixed - _MIX_RIGHT * (hashed ^ hashed >> 16) & _WORD
            mixed ^= mixed >> 16
            constant *= pow(_MULT_A, _POOL_SIZE, 2**32)
        mixed = (mixed ^ _INIT_B) * _INIT_B * _MULT_B & _WORD
        return mixed ^ mixed >> 16

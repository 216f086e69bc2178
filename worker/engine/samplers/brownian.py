"""Noise of SDE samplers: increments of a Brownian motion over sigma, from an image's seed alone.

The motion is that of torchsde's `BrownianTree` (Li et al. 2020, "Scalable Gradients for Stochastic
Differential Equations", algorithm 3), which k-diffusion and AUTOMATIC1111 take: an interval's
increment is split at its middle, with noise whose seed follows from its place in the tree, until
the points asked for are reached. Points are rounded to six digits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

_DIGITS = 6
_POOL_SIZE = 24

#: Halves that are kept: the ways from the top to both ends of an interval, some 24 each.
_MOST_KEPT = 64


class Interval(NamedTuple):
    """A node of the tree: its ends, its place, and the motion's increment over it."""

    start: float
    end: float
    place: int
    depth: int
    increment: torch.Tensor


class BrownianTree:
    """One image's Brownian motion between two sigmas."""

    def __init__(
        self, seed: int, span: tuple[float, float], draw: Callable[[int], torch.Tensor]
    ) -> None:
        """*span*: the smallest and the largest sigma; *draw* makes normal noise from a seed."""
        self._seed = seed
        self._draw = draw
        self._halves = OrderedDict[tuple[int, int], torch.Tensor]()
        whole = draw(self._seed_at(())) * math.sqrt(span[1] - span[0])
        self._top = Interval(_rounded(span[0]), _rounded(span[1]), 0, 0, whole)

    def noise(self, sigma: float, following: float) -> torch.Tensor:
        """The increment from *sigma* down to *following*, scaled to variance 1."""
        ends = (self._clamped(each) for each in (following, sigma))
        increment = self._increment(self._top, *ends)
        length = np.float32(sigma) - np.float32(following)
        return -increment / torch.tensor(length).sqrt()

    def _clamped(self, sigma: float) -> float:
        return _rounded(min(max(sigma, self._top.start), self._top.end))

    def _increment(self, top: Interval, start: float, end: float) -> torch.Tensor:
        """The increments of the largest nodes that cover an interval, added up from its start."""
        if start == end:
            return torch.zeros_like(top.increment)
        parts, waiting = [], [(top, start, end)]
        while waiting:
            node, start, end = waiting.pop()
            if (start, end) == (node.start, node.end):
                parts.append(node.increment)
                continue
            left, right = self._split(node)
            if end > left.end:
                waiting.append((right, max(start, left.end), end))
            if start < left.end:
                waiting.append((left, start, min(end, left.end)))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _split(self, node: Interval) -> tuple[Interval, Interval]:
        middle = _rounded(0.5 * (node.end + node.start))
        key = node.place, node.depth
        if (half := self._halves.get(key)) is None:
            before, after = middle - node.start, node.end - middle
            scale = 1 / (node.end - node.start)
            noise = self._draw(self._seed_at(key))
            half = before * node.increment * scale + math.sqrt(before * after * scale) * noise
            self._halves[key] = half
            if len(self._halves) > _MOST_KEPT:
                self._halves.popitem(last=False)
        self._halves.move_to_end(key)
        place, depth = 2 * node.place, node.depth + 1
        return (
            Interval(node.start, middle, place, depth, half),
            Interval(middle, node.end, place + 1, depth, node.increment - half),
        )

    def _seed_at(self, place: tuple[int, ...]) -> int:
        sequence = np.random.SeedSequence(self._seed, spawn_key=place, pool_size=_POOL_SIZE)
        return int(sequence.generate_state(1)[0])


def _rounded(sigma: float) -> float:
    return round(sigma, _DIGITS)

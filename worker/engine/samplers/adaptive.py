"""DPM adaptive: DPM-Solver-23 (Lu et al. 2022), whose steps depend on the image.

Its rows are made as it goes: three calls for each try of a step, after which the error of the
solution of order 2 against that of order 3 decides whether the step is taken, and how long the next
one is. This waits for the GPU at every third tick of such an image. All constants are
k-diffusion's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imagefleet.job.samplers import Options
from worker.engine.sampler import BEFORE, Draw, Move
from worker.engine.samplers.brownian import Interval
from worker.engine.samplers.by_sigma import ancestral, bend, solver_step

_ABSOLUTE = 0.0078
_RELATIVE = 0.05
_FIRST_LENGTH = 0.05
_ACCEPTED = 0.81
_TINY = 1e-5

#: Tries after which every step is taken, so that an image ends.
_MOST_TRIES = 150


@dataclass(frozen=True)
class Try:
    """One try of a step, from a sigma down."""

    sigma: float
    #: The sigma at which the image is done.
    last: float
    options: Options
    #: Length of the step in log sigma.
    length: float = _FIRST_LENGTH
    number: int = 0
    #: The solution of order 2 of the step that was taken last.
    before: Tensor | None = None

    @property
    def is_done(self) -> bool:
        return math.log(self.sigma / self.last) <= _TINY

    @property
    def _ends(self) -> Interval:
        """The sigma of the step's end, and the one below it that noise then raises to it."""
        end = max(self.last, self.sigma * math.exp(-self.length))
        down, _ = ancestral(self.sigma, end, self.options)
        return end, max(self.last, down)

    def moves(self) -> Iterator[Move]:
        """The three calls; after the last one the latents are those of the second."""
        first, second, third = solver_step(3, self.sigma, self._ends[1])
        for move in (first, second, third._replace(latents=BEFORE)):
            yield move._replace(finished=self.number - 1)

    def finish(self, latents: Tensor, history: Tensor, draw: Draw) -> Try:
        """Takes the step or goes back, in place, and returns the next try.

        *latents* [4, height, width] and *history* [HISTORY, 4, height, width] are as the third call
        has left them; *draw* fills a tensor with noise.
        """
        end, down = self._ends
        length = math.log(self.sigma / down)
        first = self.sigma * math.exp(-length / 3)
        second = self.sigma * math.exp(-length * 2 / 3)
        slope = (latents - history[2]) / first
        begun = latents + (self.sigma - first) * slope
        change = (latents - history[1]) / first - slope
        last_change = (history[-1] - history[0]) / second - slope
        straight = begun + (down - self.sigma) * slope
        low = straight + 1.5 * (down - self.sigma) * change
        high = straight - 1.5 * down * bend(length) * last_change
        before = begun if self.before is None else self.before
        size = torch.maximum(low.abs(), before.abs())
        allowed = (_RELATIVE * size).clamp(min=_ABSOLUTE)
        distance = float(torch.linalg.norm((low - high) / allowed))
        error = distance / math.sqrt(low.numel())
        order = 3 if self.options.eta == 0 else 1.5
        factor = 1 + math.atan((1 / (error + 1e-8)) ** (1 / order) - 1)
        following = replace(self, length=self.length * factor, number=self.number + 1)
        if factor < _ACCEPTED and self.number < _MOST_TRIES:
            latents.copy_(begun)
            return following
        if self.options.eta != 0:
            drawn = torch.empty(latents.shape)
            draw(drawn)
            high += math.sqrt(max(0.0, end**2 - down**2)) * drawn.to(high.device)
        latents.copy_(high)
        return replace(following, sigma=end, before=low)

"""What a UNet call does to the latents, as one linear combination.

A sampler's formula is written with the vectors below as its paper has it: where a step has begun
from x and the UNet's estimate is D, `LATENTS + (to - sigma) * (LATENTS - ESTIMATES[0]) / sigma`
are the coefficients of Euler's step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker.engine.sampler import HISTORY

Combination = npt.NDArray[np.float64]
"""Coefficients [1 + HISTORY]: of the latents, the estimates and the call before's latents."""

LATENTS, *ESTIMATES, BEFORE = np.eye(1 + HISTORY)


class Move(NamedTuple):
    """One UNet call and the update that follows on it."""

    level: float
    """The sigma or the timestep that the UNet is called at."""
    latents: Combination
    """The next latents."""
    noise: float | None = None
    """Standard deviation of fresh noise in them; None if none is drawn."""
    interval: tuple[float, float] | None = None
    """The sigmas between which the noise is the increment of a Brownian motion."""
    finished: int = 0
    """Steps that are finished at the call, as AUTOMATIC1111 counts them; -1 and -2 are 0."""
    estimate: tuple[float, float] = (1.0, 0.0)
    """Coefficients of latents and output in the estimate, for samplers of timesteps."""
    from_uncond: float = 0.0
    """Weight of the output without the prompt, less the one with guidance."""


def towards(ratio: float, estimate: Combination = ESTIMATES[0]) -> Combination:
    """*ratio* of the latents, and the rest of the estimate: a step by the ratio of its sigmas."""
    return ratio * LATENTS + (1 - ratio) * estimate

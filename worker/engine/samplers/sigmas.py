"""Schedules: the sigmas that a sampler steps through, by AUTOMATIC1111's names.

All are computed in float32 in the order of k-diffusion and AUTOMATIC1111: the noise of SDE samplers
follows from the sigmas to their last digits (`brownian`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

#: Karras et al. (2022), table 1.
_RHO = 7.0

#: LCM was distilled on every 20th timestep: 19, 39, ... 999.
_LCM_STRIDE = 20

#: Sabour et al. (2024), "Align Your Steps": ten steps for SD1.5 and for SDXL.
_ALIGN_YOUR_STEPS = {
    "SD1.5": (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029),
    "SDXL": (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029),
}

#: AUTOMATIC1111's `beta_dist_alpha` and `beta_dist_beta`, which here are one.
_BETA_SHAPE = 0.6
_BETA_TERMS, _BISECTIONS = 64, 60

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Levels:
    """The sigmas that a model knows, ascending in float32, and their timesteps."""

    sigmas: torch.Tensor
    timesteps: torch.Tensor
    is_xl: bool = False
    is_quantized: bool = False
    """True if the model is called at these timesteps alone, not between them."""

    @property
    def ends(self) -> tuple[float, float]:
        """The largest and the smallest sigma."""
        return float(self.sigmas[-1]), float(self.sigmas[0])

    def timestep(self, sigma: float) -> float:
        """The timestep of a sigma, whose logarithm is interpolated."""
        logs = self.sigmas.log().double()
        if self.is_quantized:
            return float(self.timesteps[(logs - math.log(sigma)).abs().argmin()])
        return float(np.interp(math.log(sigma), logs.numpy(), self.timesteps.numpy()))

    def at(self, timesteps: torch.Tensor) -> torch.Tensor:
        """The sigmas of timesteps, or of points between them, by k-diffusion's interpolation."""
        stride = self.timesteps[1] - self.timesteps[0]
        place = ((timesteps - self.timesteps[0]) / stride).clamp(0, len(self.sigmas) - 1)
        low, share, logs = place.floor().long(), place.frac(), self.sigmas.log()
        return ((1 - share) * logs[low] + share * logs[place.ceil().long()]).exp()

    def spaced(self, count: int) -> torch.Tensor:
        """So many timesteps, evenly from the last to the first."""
        return torch.linspace(float(self.timesteps[-1]), float(self.timesteps[0]), count)


def levels(alphas_cumprod: torch.Tensor, *, is_xl: bool = False) -> Levels:
    """The levels of a model's noise schedule [train timesteps]."""
    alphas = alphas_cumprod.float()
    sigmas = ((1 - alphas) / alphas) ** 0.5
    return Levels(sigmas, torch.arange(len(sigmas), dtype=torch.float32), is_xl)


def of_lcm(known: Levels) -> Levels:
    """Those of them that consistency models were distilled on."""
    part = slice(_LCM_STRIDE - 1, None, _LCM_STRIDE)
    return Levels(known.sigmas[part], known.timesteps[part], known.is_xl, is_quantized=True)


def make_sigmas(schedule: str, known: Levels, steps: int) -> list[float]:
    """The sigmas of so many steps and of their end, which is 0 but with KL Optimal."""
    if steps == 0:
        return [0.0]
    made = SCHEDULES[schedule](known, steps)
    end = [] if len(made) > steps and schedule == "kl_optimal" else [0.0]
    return [*made.tolist(), *end]


def _uniform(known: Levels, steps: int) -> torch.Tensor:
    return known.at(known.spaced(steps))


def _sgm_uniform(known: Levels, steps: int) -> torch.Tensor:
    return known.at(known.spaced(steps + 1)[:-1])


def _turbo(known: Levels, steps: int) -> torch.Tensor:
    """Whole timesteps that end a stride above -1: 999, 749, 499, 249 of four."""
    train = float(known.timesteps[-1]) + 1
    trailing = (torch.arange(1, steps + 1) * (train / steps) - 1).flip(0)
    return known.at(trailing.round().clamp(0, train - 1))


def karras(largest: float, smallest: float, steps: int) -> torch.Tensor:
    """Karras et al. (2022), equation 5."""
    low, high = smallest ** (1 / _RHO), largest ** (1 / _RHO)
    sigmas: torch.Tensor = (high + torch.linspace(0, 1, steps) * (low - high)) ** _RHO
    return sigmas


def _karras(known: Levels, steps: int) -> torch.Tensor:
    return karras(*known.ends, steps)


def _exponential(known: Levels, steps: int) -> torch.Tensor:
    largest, smallest = known.ends
    return torch.linspace(math.log(largest), math.log(smallest), steps).exp()


def _polyexponential(known: Levels, steps: int) -> torch.Tensor:
    """With AUTOMATIC1111's rho, 1, it is the exponential one, but for rounding."""
    largest, smallest = known.ends
    low = math.log(smallest)
    return (torch.linspace(1, 0, steps) * (math.log(largest) - low) + low).exp()


def _kl_optimal(known: Levels, steps: int) -> torch.Tensor:
    largest, smallest = (torch.tensor(end).arctan() for end in known.ends)
    share = torch.arange(steps + 1) / steps
    angles: torch.Tensor = share * smallest + (1.0 - share) * largest
    return angles.tan()


def _align_your_steps(known: Levels, steps: int) -> torch.Tensor:
    table = _ALIGN_YOUR_STEPS["SDXL" if known.is_xl else "SD1.5"]
    if steps == len(table):
        return torch.tensor(table)
    at = np.interp(np.linspace(0, 1, steps), np.linspace(0, 1, len(table)), np.log(table))
    return torch.from_numpy(np.exp(at)).float()


def _simple(known: Levels, steps: int) -> torch.Tensor:
    stride = len(known.sigmas) / steps
    places = [-1 - int(at * stride) for at in range(steps)]
    return known.sigmas[torch.tensor(places)]


def _ddim(known: Levels, steps: int) -> torch.Tensor:
    return known.sigmas[1 :: max(1, len(known.sigmas) // steps)].flip(0)


def _beta(known: Levels, steps: int) -> torch.Tensor:
    """Lee et al. (2024), "Beta Sampling is All You Need", of sigmas, as AUTOMATIC1111 has it."""
    largest, smallest = known.ends
    quantiles = _beta_quantiles(1 - np.linspace(0, 1, steps))
    return torch.from_numpy(smallest + quantiles * (largest - smallest)).float()


def _beta_quantiles(shares: _Numbers) -> _Numbers:
    """Quantiles of the symmetric beta distribution, by bisection of the lower half's series."""
    terms = np.arange(_BETA_TERMS)
    ratios = np.concatenate([[1.0], (terms[1:] - _BETA_SHAPE) / terms[1:]])
    weights = np.cumprod(ratios) / (terms + _BETA_SHAPE)
    scale = math.gamma(2 * _BETA_SHAPE) / math.gamma(_BETA_SHAPE) ** 2
    lower = np.minimum(shares, 1 - shares)
    low, high = np.zeros_like(lower), np.full_like(lower, 0.5)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = scale * middle**_BETA_SHAPE * (middle[:, None] ** terms @ weights)
        low, high = np.where(found < lower, middle, low), np.where(found < lower, high, middle)
    high[lower == 0] = 0
    return np.where(shares < 0.5, high, 1 - high)  # noqa: PLR2004 - the median


#: The sigmas of so many steps that the levels of a model give, by a schedule's key.
SCHEDULES: Mapping[str, Callable[[Levels, int], torch.Tensor]] = {
    "uniform": _uniform,
    "karras": _karras,
    "exponential": _exponential,
    "polyexponential": _polyexponential,
    "sgm_uniform": _sgm_uniform,
    "kl_optimal": _kl_optimal,
    "align_your_steps": _align_your_steps,
    "simple": _simple,
    "normal": _uniform,
    "ddim": _ddim,
    "beta": _beta,
    "turbo": _turbo,
}

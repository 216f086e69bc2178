"""The samplers, as tables of coefficients: one row for each call of the UNet.

All of them are linear in the latents, the UNet's output, what earlier calls estimated, and fresh
noise. So one update serves every row of a batch, whatever its sampler and wherever it stands:

    output   = unet(input_scale * latents, timestep)
    estimate = from_latents * latents + from_output * output
    latents  = keep * latents + noise_scale * noise + weights . (this and earlier estimates)

Euler, Euler ancestral and DPM++ 2M follow k-diffusion (`sampling.py`; eta and s_noise are 1). Their
latents have the variance sigma^2 + 1 and their estimate is the denoised image. The noise levels are
those of timesteps spaced evenly from the last to 0, with log-sigma interpolated (`external.py`), or
Karras et al.'s between the model's own smallest and largest sigma with rho 7.

DDIM (eta 0) and PLMS follow diffusers' DDIMScheduler and PNDMScheduler as Stable Diffusion
configures them (`leading`, `steps_offset` 1, `skip_prk_steps`, not `set_alpha_to_one`). Their
latents keep the variance 1 and their estimate is the noise. The timesteps are 1, 1 + r, 1 + 2r, ...
with r = 1000 // steps; PLMS takes the second of them twice. AUTOMATIC1111 has the same updates and,
where steps divides 1000, the same timesteps, but stops one short of the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from imagefleet import errors

#: Estimates that an update weighs, the newest first: PLMS reaches back over three and one redone.
HISTORY = 5

#: A table's columns; the weights follow them.
TIMESTEP, _INPUT_SCALE, _FROM_LATENTS, _FROM_OUTPUT, _KEEP, _NOISE_SCALE, _FIRST_WEIGHT = range(7)

#: All of a table's columns.
COLUMNS = _FIRST_WEIGHT + HISTORY

_RHO = 7.0

#: The weights of Adams and Bashforth's methods of orders 1 to 4, the newest first.
_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One image's run: the scale of its first noise, and its table [calls, columns] in float32."""

    initial_scale: float
    table: torch.Tensor
    noisy: tuple[bool, ...]
    """For each call, whether it takes noise: where it does not, none may be drawn."""


def make_schedule(
    name: str, steps: int, alphas_cumprod: torch.Tensor, prediction_type: str
) -> Schedule:
    """The schedule of a sampler of `imagefleet.job.samplers`: "epsilon" or "v_prediction".

    Raises:
        JobError: there is no such sampler here.
    """
    alphas = alphas_cumprod.double().numpy()
    sigma_move = _SIGMA_MOVES.get(name.removesuffix("_karras"))
    if sigma_move is not None:
        spaced = _karras_sigmas if name.endswith("_karras") else _even_sigmas
        all_sigmas = np.sqrt((1 - alphas) / alphas)
        sigmas = [*spaced(all_sigmas, steps).tolist(), 0.0]
        rows = [
            _row(
                float(np.interp(math.log(sigma), np.log(all_sigmas), np.arange(len(alphas)))),
                1 / math.sqrt(sigma**2 + 1),
                _to_image(sigma, prediction_type),
                sigma_move(sigmas, at),
            )
            for at, sigma in enumerate(sigmas[:-1])
        ]
        initial_scale = sigmas[0]
    elif name in _TIMESTEP_MOVES:
        rows = [
            _row(timestep, 1.0, _to_noise(alphas[timestep], prediction_type), move)
            for timestep, move in _TIMESTEP_MOVES[name](steps, alphas)
        ]
        initial_scale = 1.0
    else:
        known = ", ".join([*_SIGMA_MOVES, *_TIMESTEP_MOVES])
        raise errors.JobError(f"this engine has no sampler {name!r}, only {known}")
    noisy = tuple(row[_NOISE_SCALE] != 0 for row in rows)
    return Schedule(initial_scale, torch.tensor(rows, dtype=torch.float32), noisy)


def scale_input(rows: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The UNet's input for *latents* [batch, 4, height, width]; *rows* are [batch, columns]."""
    return latents * rows[:, _INPUT_SCALE, None, None, None]


def first_history(latents: torch.Tensor) -> torch.Tensor:
    """Zeros [HISTORY, batch, 4, height, width]: what no call has estimated yet."""
    return latents.new_zeros((HISTORY, *latents.shape))


def step(
    rows: torch.Tensor,
    latents: torch.Tensor,
    output: torch.Tensor,
    history: torch.Tensor,
    noise: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next latents and history, each row by its own coefficients, *rows* [batch, columns].

    A row that begins anew must begin with zeros in *history*: a weight of zero does not stop NaN.
    """
    columns = rows.T[..., None, None, None]
    estimate = columns[_FROM_LATENTS] * latents + columns[_FROM_OUTPUT] * output
    history = torch.cat([estimate[None], history[:-1]])
    stepped = columns[_KEEP] * latents + (columns[_FIRST_WEIGHT:] * history).sum(dim=0)
    if noise is not None:
        stepped += columns[_NOISE_SCALE] * noise
    return stepped, history


_Move = tuple[float, Sequence[float], float]
"""What one call makes of the latents: keep, weights (the newest estimate's first), noise_scale."""

_Alphas = npt.NDArray[np.float64]


def _row(
    timestep: float, input_scale: float, estimate: tuple[float, float], move: _Move
) -> list[float]:
    keep, weights, noise_scale = move
    padding = [0.0] * (HISTORY - len(weights))
    return [timestep, input_scale, *estimate, keep, noise_scale, *weights, *padding]


def _even_sigmas(all_sigmas: _Alphas, steps: int) -> _Alphas:
    timesteps = np.linspace(len(all_sigmas) - 1, 0, steps)
    return np.exp(np.interp(timesteps, np.arange(len(all_sigmas)), np.log(all_sigmas)))


def _karras_sigmas(all_sigmas: _Alphas, steps: int) -> _Alphas:
    """Karras et al. (2022), equation 5."""
    largest, smallest = all_sigmas[-1] ** (1 / _RHO), all_sigmas[0] ** (1 / _RHO)
    return np.asarray(np.linspace(largest, smallest, steps) ** _RHO)


def _to_image(sigma: float, prediction_type: str) -> tuple[float, float]:
    if prediction_type == "v_prediction":
        return 1 / (sigma**2 + 1), -sigma / math.sqrt(sigma**2 + 1)
    return 1.0, -sigma


def _to_noise(alpha: float, prediction_type: str) -> tuple[float, float]:
    if prediction_type == "v_prediction":
        return math.sqrt(1 - alpha), math.sqrt(alpha)
    return 0.0, 1.0


def _euler(sigmas: Sequence[float], at: int) -> _Move:
    ratio = sigmas[at + 1] / sigmas[at]
    return ratio, (1 - ratio,), 0.0


def _euler_ancestral(sigmas: Sequence[float], at: int) -> _Move:
    """Down further than the next level, then up to it with noise; to 0 without."""
    sigma, following = sigmas[at], sigmas[at + 1]
    ratio = (following / sigma) ** 2
    return ratio, (1 - ratio,), following * math.sqrt(1 - ratio)


def _dpmpp_2m(sigmas: Sequence[float], at: int) -> _Move:
    """Of first order where there is no earlier estimate, and to 0."""
    sigma, following = sigmas[at], sigmas[at + 1]
    ratio = following / sigma
    if at == 0 or following == 0:
        return ratio, (1 - ratio,), 0.0
    earlier = (1 - ratio) * math.log(sigma / following) / (2 * math.log(sigmas[at - 1] / sigma))
    return ratio, (1 - ratio + earlier, -earlier), 0.0


def _ddim(steps: int, alphas: _Alphas) -> Iterator[tuple[int, _Move]]:
    for timestep, following in pairwise(_timesteps(steps, alphas)):
        keep, gain = _transfer(alphas[timestep], alphas[following])
        yield timestep, (keep, (gain,), 0.0)


def _plms(steps: int, alphas: _Alphas) -> Iterator[tuple[int, _Move]]:
    """The first move is redone with the mean of the estimates at both of its ends."""
    for at, (timestep, following) in enumerate(pairwise(_timesteps(steps, alphas))):
        keep, gain = _transfer(alphas[timestep], alphas[following])
        order = min(at, len(_ADAMS_BASHFORTH) - 1)
        weights = [gain * weight for weight in _ADAMS_BASHFORTH[order]]
        if at > 0:
            weights.insert(at, 0.0)  # the estimate that only the redone move counted
        yield timestep, (keep, weights, 0.0)
        if at == 0 and steps > 1:
            yield following, (1.0, (gain / 2, -gain / 2), 0.0)


def _timesteps(steps: int, alphas: _Alphas) -> list[int]:
    """One a step, and the one that the last step leads to."""
    stride = len(alphas) // steps
    return [*(1 + stride * at for at in reversed(range(steps))), 0]


def _transfer(alpha: float, following: float) -> tuple[float, float]:
    """Weights of the latents and the noise in the latents of the following level (DDIM, eq. 12)."""
    keep = math.sqrt(following / alpha)
    return keep, math.sqrt(1 - following) - keep * math.sqrt(1 - alpha)


_SIGMA_MOVES: Mapping[str, Callable[[Sequence[float], int], _Move]] = {
    "euler_ancestral": _euler_ancestral,
    "euler": _euler,
    "dpmpp_2m": _dpmpp_2m,
}
_TIMESTEP_MOVES: Mapping[str, Callable[[int, _Alphas], Iterator[tuple[int, _Move]]]] = {
    "ddim": _ddim,
    "plms": _plms,
}

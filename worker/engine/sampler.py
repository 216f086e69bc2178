"""The samplers, as tables of coefficients with one row per UNet call.

Every sampler here is linear in the latents, the UNet's output, earlier estimates and fresh noise.
So one update serves all rows of a batch, whatever each row's sampler and step:

    output   = unet(input_scale * latents, timestep)
    estimate = from_latents * latents + from_output * output
    latents  = keep * latents + noise_scale * noise + weights . [estimate, earlier estimates]

Euler, Euler ancestral and DPM++ 2M follow k-diffusion (`sampling.py`, eta = s_noise = 1). Their
latents have variance sigma^2 + 1, and the estimate is the denoised image. Their sigmas belong to
evenly spaced timesteps from the last to 0, with log sigma interpolated (`external.py`), or are
Karras et al.'s between the model's largest and smallest sigma with rho = 7.

DDIM (eta = 0) and PLMS follow diffusers' DDIMScheduler and PNDMScheduler with Stable Diffusion's
options (`leading`, `steps_offset` 1, `skip_prk_steps`, not `set_alpha_to_one`). Their latents have
variance 1, and the estimate is the noise. Their timesteps are 1, 1 + r, 1 + 2r, ... with
r = 1000 // steps; PLMS calls the UNet twice at the second one. AUTOMATIC1111 has the same updates,
and the same timesteps if steps divides 1000, but stops one short of the last.
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

#: Estimates that an update weighs, newest first: PLMS uses four, and skips one it has replaced.
HISTORY = 5

#: The columns of a schedule's table; HISTORY weights start at the last one.
TIMESTEP, _INPUT_SCALE, _FROM_LATENTS, _FROM_OUTPUT, _KEEP, _NOISE_SCALE, _FIRST_WEIGHT = range(7)

#: The number of columns.
COLUMNS = _FIRST_WEIGHT + HISTORY

#: Karras et al. (2022), table 1.
_RHO = 7.0

#: The weights of the Adams-Bashforth methods of orders 1 to 4, newest first.
_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One image's coefficients, one row per UNet call."""

    initial_scale: float
    """Standard deviation of the first latents."""
    table: torch.Tensor
    """[calls, COLUMNS] in float32."""
    noisy: tuple[bool, ...]
    """True for calls that use noise; for others none may be drawn, or later noise would change."""


def make_schedule(
    name: str, steps: int, alphas_cumprod: torch.Tensor, prediction_type: str
) -> Schedule:
    """The schedule of one of `imagefleet.job.samplers`.

    Args:
        name: the sampler's canonical name, such as "dpmpp_2m_karras".
        steps: the job's steps; PLMS makes one UNet call more.
        alphas_cumprod: the model's noise schedule [train timesteps] in float64.
        prediction_type: what the UNet predicts, "epsilon" or "v_prediction".

    Raises:
        JobError: there is no such sampler.
    """
    alphas = alphas_cumprod.double().numpy()
    sigma_update = _SIGMA_UPDATES.get(name.removesuffix("_karras"))
    if sigma_update is not None:
        make_sigmas = _karras_sigmas if name.endswith("_karras") else _even_sigmas
        all_sigmas = np.sqrt((1 - alphas) / alphas)
        sigmas = [*make_sigmas(all_sigmas, steps).tolist(), 0.0]
        rows = [
            _row(
                float(np.interp(math.log(sigma), np.log(all_sigmas), np.arange(len(alphas)))),
                1 / math.sqrt(sigma**2 + 1),
                _to_image(sigma, prediction_type),
                sigma_update(sigmas, at),
            )
            for at, sigma in enumerate(sigmas[:-1])
        ]
        initial_scale = sigmas[0]
    elif name in _TIMESTEP_UPDATES:
        rows = [
            _row(timestep, 1.0, _to_noise(alphas[timestep], prediction_type), update)
            for timestep, update in _TIMESTEP_UPDATES[name](steps, alphas)
        ]
        initial_scale = 1.0
    else:
        known = ", ".join([*_SIGMA_UPDATES, *_TIMESTEP_UPDATES])
        raise errors.JobError(f"unknown sampler {name!r}; this engine has only {known}")
    noisy = tuple(row[_NOISE_SCALE] != 0 for row in rows)
    return Schedule(initial_scale, torch.tensor(rows, dtype=torch.float32), noisy)


def scale_input(rows: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The UNet's input for latents [batch, 4, height, width] and table rows [batch, COLUMNS]."""
    return latents * rows[:, _INPUT_SCALE, None, None, None]


def step(
    rows: torch.Tensor,
    latents: torch.Tensor,
    output: torch.Tensor,
    history: torch.Tensor,
    noise: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of a batch: the next latents and history.

    A row that restarts needs zeros in *history*: its weights are 0, but 0 times NaN is NaN.

    Args:
        rows: each image's row of its table [batch, COLUMNS].
        latents: [batch, 4, height, width].
        output: the UNet's, with guidance [batch, 4, height, width].
        history: earlier estimates, newest first [HISTORY, batch, 4, height, width].
        noise: [batch, 4, height, width], or None if no row uses any.
    """
    columns = rows.T[..., None, None, None]
    estimate = columns[_FROM_LATENTS] * latents + columns[_FROM_OUTPUT] * output
    history = torch.cat([estimate[None], history[:-1]])
    stepped = columns[_KEEP] * latents + (columns[_FIRST_WEIGHT:] * history).sum(dim=0)
    if noise is not None:
        stepped += columns[_NOISE_SCALE] * noise
    return stepped, history


_Update = tuple[float, Sequence[float], float]
"""keep, weights (newest estimate first), noise_scale."""

_Alphas = npt.NDArray[np.float64]


def _row(
    timestep: float, input_scale: float, estimate: tuple[float, float], update: _Update
) -> list[float]:
    keep, weights, noise_scale = update
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
    """Coefficients of latents and output in the denoised image."""
    if prediction_type == "v_prediction":
        return 1 / (sigma**2 + 1), -sigma / math.sqrt(sigma**2 + 1)
    return 1.0, -sigma


def _to_noise(alpha: float, prediction_type: str) -> tuple[float, float]:
    """Coefficients of latents and output in the noise."""
    if prediction_type == "v_prediction":
        return math.sqrt(1 - alpha), math.sqrt(alpha)
    return 0.0, 1.0


def _euler(sigmas: Sequence[float], at: int) -> _Update:
    ratio = sigmas[at + 1] / sigmas[at]
    return ratio, (1 - ratio,), 0.0


def _euler_ancestral(sigmas: Sequence[float], at: int) -> _Update:
    """Steps down past the next sigma, then adds noise back up to it; none at the last step."""
    sigma, following = sigmas[at], sigmas[at + 1]
    ratio = (following / sigma) ** 2
    return ratio, (1 - ratio,), following * math.sqrt(1 - ratio)


def _dpmpp_2m(sigmas: Sequence[float], at: int) -> _Update:
    """First order at the first step, without an earlier estimate, and at the last, to sigma 0."""
    sigma, following = sigmas[at], sigmas[at + 1]
    ratio = following / sigma
    if at == 0 or following == 0:
        return ratio, (1 - ratio,), 0.0
    earlier = (1 - ratio) * math.log(sigma / following) / (2 * math.log(sigmas[at - 1] / sigma))
    return ratio, (1 - ratio + earlier, -earlier), 0.0


def _ddim(steps: int, alphas: _Alphas) -> Iterator[tuple[int, _Update]]:
    for timestep, following in pairwise(_timesteps(steps, alphas)):
        keep, gain = _transfer(alphas[timestep], alphas[following])
        yield timestep, (keep, (gain,), 0.0)


def _plms(steps: int, alphas: _Alphas) -> Iterator[tuple[int, _Update]]:
    """The first step is repeated with the mean of the estimates at both of its ends."""
    for at, (timestep, following) in enumerate(pairwise(_timesteps(steps, alphas))):
        keep, gain = _transfer(alphas[timestep], alphas[following])
        order = min(at, len(_ADAMS_BASHFORTH) - 1)
        weights = [gain * weight for weight in _ADAMS_BASHFORTH[order]]
        if at > 0:
            weights.insert(at, 0.0)  # the estimate that only the repeated step uses
        yield timestep, (keep, weights, 0.0)
        if at == 0 and steps > 1:
            yield following, (1.0, (gain / 2, -gain / 2), 0.0)


def _timesteps(steps: int, alphas: _Alphas) -> list[int]:
    """The timestep of each step, and of the last one's result."""
    stride = len(alphas) // steps
    return [*(1 + stride * at for at in reversed(range(steps))), 0]


def _transfer(alpha: float, following: float) -> tuple[float, float]:
    """Coefficients of latents and noise in the next latents (Song et al. 2021, equation 12)."""
    keep = math.sqrt(following / alpha)
    return keep, math.sqrt(1 - following) - keep * math.sqrt(1 - alpha)


_SIGMA_UPDATES: Mapping[str, Callable[[Sequence[float], int], _Update]] = {
    "euler_ancestral": _euler_ancestral,
    "euler": _euler,
    "dpmpp_2m": _dpmpp_2m,
}
_TIMESTEP_UPDATES: Mapping[str, Callable[[int, _Alphas], Iterator[tuple[int, _Update]]]] = {
    "ddim": _ddim,
    "plms": _plms,
}

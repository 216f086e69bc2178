"""Euler ancestral sampling as AUTOMATIC1111 (k-diffusion) does it: pure functions over tensors.

Sigmas are plain floats: read from the GPU, each would make the CPU wait for it at every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Schedule:
    """The noise levels of a run: one timestep a step (a fraction, too), and one sigma more, 0."""

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]


def make_schedule(alphas_cumprod: torch.Tensor, steps: int) -> Schedule:
    """Spaces the timesteps evenly and interpolates log-sigma (k-diffusion's DiscreteSchedule)."""
    alphas = alphas_cumprod.double()
    log_sigmas = ((1 - alphas) / alphas).sqrt().log()
    timesteps = torch.linspace(len(alphas) - 1, 0, steps, dtype=torch.float64)
    below, above = timesteps.floor().long(), timesteps.ceil().long()
    sigmas = torch.lerp(log_sigmas[below], log_sigmas[above], timesteps.frac()).exp()
    return Schedule(tuple(timesteps.tolist()), (*sigmas.tolist(), 0.0))


def scale_input(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    """The UNet was trained on inputs of unit variance."""
    return latents / math.sqrt(sigma**2 + 1)


def denoised(
    latents: torch.Tensor, output: torch.Tensor, sigma: float, prediction_type: str
) -> torch.Tensor:
    """The image that the UNet's output foresees, for 'epsilon' and 'v_prediction' models."""
    if prediction_type == "v_prediction":
        return latents / (sigma**2 + 1) - output * (sigma / math.sqrt(sigma**2 + 1))
    return latents - sigma * output


def step(
    latents: torch.Tensor,
    foreseen: torch.Tensor,
    sigma: float,
    next_sigma: float,
    noise: torch.Tensor | None,
) -> torch.Tensor:
    """One step from *sigma* to *next_sigma*, eta 1; the last one, to 0, takes no noise."""
    slope = (latents - foreseen) / sigma
    if noise is None:
        return latents + slope * (next_sigma - sigma)
    sigma_up = next_sigma * math.sqrt(1 - (next_sigma / sigma) ** 2)
    sigma_down = next_sigma**2 / sigma
    return latents + slope * (sigma_down - sigma) + noise * sigma_up

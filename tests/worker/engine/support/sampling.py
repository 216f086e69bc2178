"""Runs schedules without an engine, on a function in place of the UNet."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker.engine import sampler

SHAPE = (2, 4, 8, 8)

Unet = Callable[..., torch.Tensor]


def alphas_cumprod() -> torch.Tensor:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0)


def stand_in(inputs: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
    """Instead of the UNet: a smooth, non-linear function of input and timestep."""
    times = (timesteps.float() / 1000).view(-1, 1, 1, 1)
    return (inputs + 0.3 * inputs.roll(1, dims=-1) * (1 - times)).tanh() * (
        0.5 + 0.4 * times
    )


def noises(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


def sample(
    schedule: sampler.Schedule,
    noise: list[torch.Tensor],
    unet: Unet,
    *,
    image: torch.Tensor | float = 0.0,
    inpainting: sampler.Inpainting | None = None,
    uncond: Unet | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Runs a schedule on all rows, starting from the first of *noise* and an *image*."""
    fresh = iter(noise)
    latents = schedule.image_scale * image + next(fresh) * schedule.initial_scale
    if schedule.initial_churn is not None:
        latents = latents + next(fresh) * schedule.initial_churn
    history = latents.new_zeros((sampler.HISTORY, *latents.shape))
    call = 0
    while call < len(schedule.table):
        row = schedule.table[call]
        noisy = schedule.noisy[call]
        call += 1
        rows = row.expand(len(latents), -1)
        seen = (
            latents
            if inpainting is None
            else sampler.mask_input(rows, latents, inpainting)
        )
        inputs = seen * rows[:, sampler.INPUT_SCALE, None, None, None]
        times = rows[:, sampler.TIMESTEP]
        output = unet(inputs, times)
        without = None if uncond is None else uncond(inputs, times)
        if without is not None:
            output = without + scale * schedule.guidance_share * (output - without)
        taken = next(fresh) if noisy else None
        latents, history = sampler.step(
            rows, latents, output, history, taken, inpainting, without
        )
        if call == len(schedule.table) and schedule.extend is not None:
            schedule = schedule.extend(
                latents, history, lambda out: out.copy_(next(fresh))
            )
    return latents


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def too_different(found: Mapping[Any, float]) -> dict[Any, float]:
    """The differences of *found* that are not below 1e-5, by what they are of."""
    return {of: difference for of, difference in found.items() if not difference < 1e-5}


def taking(noise: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Draws these in their order, whatever it is asked for."""
    fresh = iter(noise)
    return lambda *_, **__: next(fresh)

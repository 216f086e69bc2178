"""Noise to latents: the UNet called as often as the images' schedules say, each by its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from diffusers import UNet2DConditionModel

from worker.engine import contract, sampler, text


class Image(Protocol):
    """What is asked for, and the way to it."""

    @property
    def request(self) -> contract.ImageRequest: ...

    @property
    def schedule(self) -> sampler.Schedule: ...


def denoise(
    unet: UNet2DConditionModel, images: Sequence[Image], context: text.Context, vae_factor: int
) -> torch.Tensor:
    """Latents [batch, 4, height, width] in float32, as the noise is, whatever the UNet's type.

    The images have one size and as many calls. *context* has the prompts' rows, then the negative
    prompts'. Each image draws its noise from its own generator, on the CPU: it does not depend on
    the others in its batch, nor on the GPU.
    """
    device, first = unet.device, images[0].request
    shape = (unet.config.in_channels, first.height // vae_factor, first.width // vae_factor)
    schedules = [image.schedule for image in images]
    generators = [torch.Generator().manual_seed(image.request.seed) for image in images]
    scales = _per_image([image.request.cfg_scale for image in images], device)

    starts = _per_image([schedule.initial_scale for schedule in schedules], device)
    latents = draw_noise(generators, shape).to(device) * starts
    history = sampler.first_history(latents)
    tables = torch.stack([schedule.table for schedule in schedules], dim=1).to(device)
    for call, rows in enumerate(tables):
        inputs = sampler.scale_input(rows, latents).to(unet.dtype)
        output = unet(
            inputs.repeat(2, 1, 1, 1),
            rows[:, sampler.TIMESTEP].repeat(2),
            encoder_hidden_states=context.vectors,
            encoder_attention_mask=context.mask,
            return_dict=False,
        )[0]
        cond, uncond = output.float().chunk(2)
        guided = uncond + scales * (cond - uncond)
        noisy = [
            generator if schedule.noisy[call] else None
            for generator, schedule in zip(generators, schedules, strict=True)
        ]
        noise = draw_noise(noisy, shape).to(device) if any(noisy) else None
        latents, history = sampler.step(rows, latents, guided, history, noise)
    return latents


def draw_noise(
    generators: Sequence[torch.Generator | None], shape: tuple[int, int, int]
) -> torch.Tensor:
    """Noise [rows, *shape]; zeros for a row without a generator."""
    return torch.stack(
        [
            torch.randn(shape, generator=generator) if generator else torch.zeros(shape)
            for generator in generators
        ]
    )


def _per_image(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)[:, None, None, None]

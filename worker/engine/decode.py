"""Latents to pixels, and which of them are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from diffusers import AutoencoderKL

from imagefleet import errors
from worker.engine import contract

log = logging.getLogger(__name__)

#: Pixels decoded in one call: the VAE needs far more memory for each than the UNet does.
_DECODE_PIXELS = 1024 * 1024


def decode(vae: AutoencoderKL, latents: torch.Tensor, pixels: int) -> list[contract.Outcome]:
    """Images from latents [batch, 4, height, width], of so many *pixels* each; errors for NaN."""
    parts = torch.split(latents, max(1, _DECODE_PIXELS // pixels))
    return [outcome for part in parts for outcome in _decode_part(vae, part)]


def _decode_part(vae: AutoencoderKL, latents: torch.Tensor) -> Iterator[contract.Outcome]:
    images = _decode_once(vae, latents)
    if vae.dtype == torch.float16 and not images.isfinite().all() and latents.isfinite().all():
        log.warning(
            "the VAE overflows in float16: it decodes in float32 from now on",
            extra={"action": "vae_widened"},
        )
        vae.float()
        images = _decode_once(vae, latents)
    pixels, sound = to_pixels(images)
    for row, is_sound in zip(pixels.cpu().numpy(), sound.tolist(), strict=True):
        yield row if is_sound else errors.TransientError("the image came out as NaN")


def _decode_once(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    scaled = (latents / vae.config.scaling_factor).to(vae.dtype)
    images: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
    return images.float()


def to_pixels(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [images, height, width, 3] in 8 bits, and for each image whether it is finite."""
    levels = ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 1).contiguous(), images.isfinite().flatten(1).all(dim=1)

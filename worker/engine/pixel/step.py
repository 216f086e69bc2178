"""Ticks of a pixel stage: one UNet call and one sampler step of every slot's image."""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.engine import sampler
from worker.engine.pixel import schedules
from worker.engine.pixel.unet import PixelUnet

CHANNELS = 3

#: The column of the guidance scale, after the schedule's own columns.
GUIDANCE = schedules.COLUMNS


class SlotState(NamedTuple):
    """The slots' tensors, which a tick updates in place."""

    images: torch.Tensor
    """[slots, 3, height, width], always float32."""
    history: torch.Tensor
    """Earlier estimates of the images [sampler.HISTORY, slots, 3, height, width]."""
    rows: torch.Tensor
    """[slots, columns]: this call's coefficients, then the guidance scale."""
    noise: torch.Tensor
    """[slots, 3, height, width]"""
    context: torch.Tensor
    """[2 * slots, tokens, width]: the text's keys and values."""
    added: torch.Tensor
    """[2 * slots, width], added to the embedded timesteps."""
    upscaled: torch.Tensor | None
    """[slots, 3, height, width]: the images of the stage before, with noise, if there is one."""

    def first(self, slots: int) -> SlotState:
        """Views of the first slots."""
        return SlotState(
            self.images[:slots],
            self.history[:, :slots],
            self.rows[:slots],
            self.noise[:slots],
            self.context[: 2 * slots],
            self.added[: 2 * slots],
            None if self.upscaled is None else self.upscaled[:slots],
        )


def make_slot_state(
    unet: PixelUnet, slots: int, *, size: tuple[int, int], tokens: int, upscales: bool
) -> SlotState:
    """Zeros for images of *size* (width, height)."""
    width, height = size
    shape = (slots, CHANNELS, height, width)

    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=unet.device)

    return SlotState(
        images=zeros(*shape),
        history=zeros(sampler.HISTORY, *shape),
        rows=zeros(slots, GUIDANCE + 1),
        noise=zeros(*shape),
        context=zeros(2 * slots, tokens, unet.context_width, dtype=unet.dtype),
        added=zeros(2 * slots, unet.added_width, dtype=unet.dtype),
        upscaled=zeros(*shape) if upscales else None,
    )


def tick(unet: PixelUnet, limit: float | None, rank: float | None, state: SlotState) -> None:
    """One UNet call and one sampler step of all slots, in place.

    *limit* and *rank*: see `threshold`. As in diffusers' pipelines the noise is guided, and the
    variance is the prompt's own.
    """
    images, rows = state.images, state.rows
    x = sampler.scale_input(rows, images)
    if state.upscaled is not None:
        x = torch.cat([x, state.upscaled], dim=1)
    x = x.to(unet.dtype)
    if x.device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    output = unet(x, rows[:, sampler.TIMESTEP], state.context, state.added)
    cond, uncond = output.float().unflatten(0, (-1, 2)).unbind(dim=1)
    predicted, variance = cond.split(CHANNELS, dim=1)
    columns = rows.T[..., None, None, None]
    unguided = uncond[:, :CHANNELS]
    guided = unguided + columns[GUIDANCE] * (predicted - unguided)
    estimate = columns[sampler.FROM_LATENTS] * images + columns[sampler.FROM_OUTPUT] * guided
    if limit is not None:
        estimate = threshold(estimate, limit, rank)
    estimates = torch.cat([estimate[None], state.history[:-1]])
    weights = columns[sampler.FIRST_WEIGHT : sampler.COLUMNS]
    stepped = columns[sampler.KEEP] * images + (weights * estimates).sum(dim=0)
    share = (variance + 1) / 2
    small, large = columns[schedules.SMALL_LOG], columns[schedules.LARGE_LOG]
    deviation = torch.exp(0.5 * (share * large + (1 - share) * small))
    images.copy_(stepped + columns[sampler.NOISE_SCALE] * deviation * state.noise)
    state.history.copy_(estimates)


def threshold(images: torch.Tensor, limit: float, rank: float | None) -> torch.Tensor:
    """Images [batch, 3, height, width] within -1 and 1 by dynamic thresholding.

    Saharia et al. (2022), section 2.3: clamped to the absolute value of *rank* (`find_rank`), but
    between 1 and *limit*, and divided by it. Without a *rank*, clamped to *limit*.
    """
    if rank is None:
        return images.clamp(-limit, limit)
    sizes = images.flatten(1).abs().sort(dim=1).values
    below = int(rank)
    above = min(below + 1, sizes.shape[1] - 1)
    scale = torch.lerp(sizes[:, below], sizes[:, above], rank - below)
    scale = scale.clamp(min=1, max=limit)[:, None, None, None]
    return images.clamp(-scale, scale) / scale


def find_rank(quantile: float, count: int) -> float:
    """The rank at which a quantile of *count* sorted values is, between two of them.

    In float32, as `torch.quantile` computes it at each call.
    """
    return float(torch.tensor(quantile, dtype=torch.float32) * (count - 1))

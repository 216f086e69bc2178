"""The one update that all samplers share, and its table: one row of coefficients per UNet call.

Every sampler is linear in the latents, the UNet's output, earlier estimates and fresh noise, so one
update serves all rows of a batch, whatever each row's sampler and step:

    output   = unet(input_scale * latents, timestep)
    estimate = from_latents * latents + from_output * output
    latents  = keep * latents + noise_scale * noise + weights . [estimate, earlier ones, before]

*before* are the latents that the last call began with, from which a step's second call starts. One
sampler also takes the output without guidance. Inpainting keeps a part of the latents, as
AUTOMATIC1111's `CFGDenoiser` does: of the estimate where that is the image, and of what the UNet
sees where it is the noise. The rows of each sampler are made in `worker.engine.samplers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Estimates that an update weighs, newest first: PLMS uses four, and skips one it has replaced.
ESTIMATES = 5

#: What is kept of a row's earlier calls: estimates, and the latents that the last one began with.
HISTORY = ESTIMATES + 1

#: The columns of a schedule's table; HISTORY weights start at the last one. The two of a kept part
#: are what an estimate is there, of the original and of the latents.
(
    TIMESTEP,
    INPUT_SCALE,
    FROM_LATENTS,
    FROM_OUTPUT,
    KEEP,
    NOISE_SCALE,
    MASKS_INPUT,
    FROM_UNCOND,
    KEPT_FROM_ORIGINAL,
    KEPT_FROM_LATENTS,
    FIRST_WEIGHT,
) = range(11)

#: The number of columns.
COLUMNS = FIRST_WEIGHT + HISTORY


class BrownianNoise(NamedTuple):
    """Noise that is increments of a Brownian motion over sigma."""

    span: tuple[float, float]
    """The smallest and the largest sigma."""
    intervals: tuple[tuple[float, float], ...]
    """From which sigma to which, in the order of the calls with noise."""


Extend = Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], None]], "Schedule"]
"""From an image's latents, which it may change, its history, and what fills a tensor with noise."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One image's coefficients, one row per UNet call."""

    initial_scale: float
    """Standard deviation of the first latents."""
    table: torch.Tensor
    """[calls, COLUMNS] in float32."""
    noisy: tuple[bool, ...]
    """True for calls that use noise; for others none may be drawn, or later noise would change."""
    initial_churn: float | None = None
    """Standard deviation of more noise for the first latents; None if none may be drawn."""
    unguided: tuple[bool, ...] = ()
    """True for calls that take the prompt's output alone, without guidance; () for none."""
    image_scale: float = 0.0
    """What the first latents have of an image's; 0 where they are noise alone."""
    brownian: BrownianNoise | None = None
    """The noise of SDE samplers; None for noise that is drawn one after the other."""
    finished: tuple[int, ...] = ()
    """How many steps are finished at each call, as AUTOMATIC1111 counts them."""
    guidance_share: float = 1.0
    """What multiplies the guidance scale."""
    extend: Extend | None = None
    """Makes the schedule longer after its last call; None for one that is whole."""


class Inpainting(NamedTuple):
    """What stays of each image of a batch while the rest is drawn anew."""

    kept: torch.Tensor
    """[batch, 1, height, width]: 1 where the original stays, 0 elsewhere."""
    original: torch.Tensor
    """The latents that it began with, without noise [batch, 4, height, width]."""


def mask_input(rows: torch.Tensor, latents: torch.Tensor, image: Inpainting) -> torch.Tensor:
    """The latents that the UNet sees: the original's where DDIM and PLMS keep it."""
    kept = rows[:, MASKS_INPUT, None, None, None] * image.kept
    return latents * (1 - kept) + image.original * kept


def restore(latents: torch.Tensor, image: Inpainting) -> torch.Tensor:
    """Drawn latents with what an image keeps, of one image or a batch."""
    return latents * (1 - image.kept) + image.original * image.kept


def scale_input(rows: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The UNet's input for latents [batch, 4, height, width] and table rows [batch, COLUMNS]."""
    return latents * rows[:, INPUT_SCALE, None, None, None]


def step(
    rows: torch.Tensor,
    latents: torch.Tensor,
    output: torch.Tensor,
    history: torch.Tensor,
    noise: torch.Tensor | None,
    image: Inpainting | None = None,
    uncond: torch.Tensor | None = None,
    limit: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of a batch: the next latents and history.

    A row that restarts needs zeros in *history*: its weights are 0, but 0 times NaN is NaN.

    *rows* are of each image's table [batch, COLUMNS]; *history* earlier estimates, newest first,
    and the latents before the last call [HISTORY, batch, 4, height, width]; latents, the UNet's
    *output* with guidance, the one without (*uncond*) and *noise* are [batch, 4, height, width].
    Noise and *uncond* are None if no row uses any, *image* if none keeps anything. *limit* is what
    estimates are limited by, if by anything.
    """
    columns = rows.T[..., None, None, None]
    seen = latents if image is None else mask_input(rows, latents, image)
    estimate = columns[FROM_LATENTS] * seen + columns[FROM_OUTPUT] * output
    if limit is not None:
        estimate = limit(estimate)
    if image is not None:
        kept = (1 - columns[MASKS_INPUT]) * image.kept
        there = columns[KEPT_FROM_ORIGINAL] * image.original + columns[KEPT_FROM_LATENTS] * latents
        estimate = estimate * (1 - kept) + there * kept
    estimates = torch.cat([estimate[None], history[: ESTIMATES - 1]])
    stepped = columns[KEEP] * latents + columns[-1] * history[-1]
    stepped += (columns[FIRST_WEIGHT:-1] * estimates).sum(dim=0)
    if uncond is not None:
        stepped += columns[FROM_UNCOND] * (uncond - output)
    if noise is not None:
        stepped += columns[NOISE_SCALE] * noise
    return stepped, torch.cat([estimates, latents[None]])

"""A checkpoint's noise schedule, and what its UNet predicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler

from imagefleet import errors

#: Empty tensors that mark the single files of some checkpoints.
V_PREDICTION_KEY, ZERO_TERMINAL_SNR_KEY = "v_pred", "ztsnr"

#: AUTOMATIC1111's last value in place of 0, from which no image could be computed.
_LAST_ALPHA = 4.8973451890853435e-08

#: The highest level of noise on the image of an x4 upscaler whose configuration says none.
_MAX_LEVEL = 350


@dataclass(frozen=True, slots=True)
class ImageNoise:
    """The noise on the image that an x4 upscaler enlarges."""

    scheduler: DDPMScheduler
    max_level: int
    """The highest timestep."""

    @property
    def timesteps(self) -> int:
        """The number of timesteps, of which a level is one."""
        return int(self.scheduler.config.num_train_timesteps)


def image_noise(index: Mapping[str, Any], scheduler: Mapping[str, Any], levels: int) -> ImageNoise:
    """Reads it from a folder's configurations; *levels*: how many the UNet knows."""
    made = DDPMScheduler.from_config(dict(scheduler))
    level = index.get("max_noise_level")
    level = level if isinstance(level, int) else _MAX_LEVEL
    # On a GPU, a level out of range is a device-side assert, which ends the process.
    level = min(level, levels - 1, int(made.config.num_train_timesteps) - 1)
    return ImageNoise(made, level)


def prediction_type(
    model: Path, scheduler: Mapping[str, Any], stated: str | None, keys: Collection[str]
) -> str | None:
    """What a UNet predicts by its scheduler's configuration, by what is *stated*, or by its keys.

    A single file's own mark goes before the configuration that lies beside it. Raises SetupError if
    it predicts something else.
    """
    if V_PREDICTION_KEY in keys and stated != "epsilon":
        return "v_prediction"
    found = scheduler.get("prediction_type", stated)
    if found not in {None, "epsilon", "v_prediction"}:
        raise errors.SetupError(
            f"{str(model)!r} predicts {str(found)[:40]!r}; imagefleet generates with checkpoints"
            " that predict epsilon or v_prediction"
        )
    return found if found is None else str(found)


def alphas_cumprod(
    model: Path, scheduler: Mapping[str, Any], keys: Collection[str]
) -> torch.Tensor:
    """SD's 'scaled_linear' schedule: betas with evenly spaced square roots.

    Raises SetupError if the checkpoint has another one.
    """
    if scheduler.get("beta_schedule", "scaled_linear") != "scaled_linear":
        raise errors.SetupError(f"{str(model)!r} does not have Stable Diffusion's noise schedule")
    start, end = scheduler.get("beta_start", 0.00085), scheduler.get("beta_end", 0.012)
    count = scheduler.get("num_train_timesteps", 1000)
    betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, dim=0)
    rescales = scheduler.get("rescale_betas_zero_snr") or ZERO_TERMINAL_SNR_KEY in keys
    return rescale_to_zero_terminal_snr(alphas) if rescales else alphas


def rescale_to_zero_terminal_snr(alphas: torch.Tensor) -> torch.Tensor:
    """Lin et al. (2024), algorithm 1, with AUTOMATIC1111's last value: nothing but noise there."""
    roots = alphas.sqrt()
    first, last = roots[0].item(), roots[-1].item()
    rescaled = ((roots - last) * (first / (first - last))) ** 2
    rescaled[-1] = _LAST_ALPHA
    return rescaled

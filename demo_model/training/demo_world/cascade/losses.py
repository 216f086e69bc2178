"""What a stage is trained on: its prediction, and the share of the variance between its bounds.

The hybrid loss of Nichol and Dhariwal (2021), section 3.1: the squared error of the noise, and a
little of the variational bound, whose gradient reaches the variance alone. A stage whose scheduler
says so predicts the velocity instead of the noise (Salimans and Ho, 2022).
"""

import math
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional

from demo_world.cascade import networks
from demo_world.cascade.networks import StageName

#: Of the variational bound, at 1,000 timesteps: their lambda of 0.001, times 1,000.
_VARIANCE_WEIGHT = 1.0

#: Hang et al. (2023): errors at timesteps of little noise count no more than this.
_MOST_SNR = 5.0

_LEAST_VARIANCE = 1e-20


class StageLoss:
    """The loss of one stage's UNet on pictures and their text states."""

    def __init__(
        self, stage: StageName, scheduler: DDPMScheduler, device: torch.device
    ) -> None:
        alphas = scheduler.alphas_cumprod.double()
        before = torch.cat([torch.ones(1, dtype=alphas.dtype), alphas[:-1]])
        betas = 1 - alphas / before
        posterior = ((1 - before) / (1 - alphas) * betas).clamp_min(_LEAST_VARIANCE)
        snr = alphas / (1 - alphas)
        self._is_velocity = scheduler.config.prediction_type == "v_prediction"
        # The squared error of a velocity is that of the image times 1 + SNR, of a noise times SNR.
        errors = 1 + snr if self._is_velocity else snr
        weights = errors.clamp_max(_MOST_SNR) / errors

        def table(values: Tensor) -> Tensor:
            return values.float().to(device)[:, None, None, None]

        self._stage = stage
        self._signal, self._noise = table(alphas.sqrt()), table((1 - alphas).sqrt())
        # The mean of the posterior moves by this for each unit of the estimated image.
        self._of_image = table(before.sqrt() * betas / (1 - alphas))
        self._small_log, self._large_log = table(posterior.log()), table(betas.log())
        self._weights = (weights / weights.mean()).float().to(device)

    def __call__(
        self, unet: UNet2DConditionModel | Any, pictures: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The prediction's and the variance's part of the loss.

        Args:
            unet: of the stage; may be compiled.
            pictures: [B, 3, side, side] of 0..255, of the second stage's size.
            states: text states [B, tokens, width].
        """
        target, inputs, levels = self._prepare(pictures)
        timesteps = torch.randint(
            len(self._signal), (len(target),), device=target.device
        )
        noise = torch.randn_like(target)
        noisy = self._signal[timesteps] * target + self._noise[timesteps] * noise
        known = {} if levels is None else {"class_labels": levels}
        x = noisy if inputs is None else torch.cat([noisy, inputs], dim=1)
        output = unet(
            x, timesteps, encoder_hidden_states=states, **known
        ).sample.float()
        predicted, share = output.chunk(2, dim=1)
        signal, sigma = self._signal[timesteps], self._noise[timesteps]
        wanted = signal * noise - sigma * target if self._is_velocity else noise
        missed = wanted - predicted
        errors = missed.square().mean((1, 2, 3))
        of_prediction = (self._weights[timesteps] * errors).mean()
        missed_image = (
            sigma if self._is_velocity else sigma / signal
        ) * missed.detach()
        return of_prediction, self._variance(timesteps, missed_image, share)

    def _prepare(self, pictures: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What is drawn, and for the second stage the enlarged image with noise, and its level."""
        side = networks.SIDES["base"]
        small = functional.adaptive_avg_pool2d(pictures.float(), side)
        if self._stage == "base":
            return small / 127.5 - 1, None, None
        # As the pixel engine finds it: stored in 8 bits, enlarged, with noise of one level.
        large = networks.SIDES["sr"]
        images = small.round() / 127.5 - 1
        images = functional.interpolate(
            images, (large, large), mode="bilinear", align_corners=True
        )
        # More of the low levels, which are those that jobs ask for.
        levels = (
            torch.rand(len(images), device=images.device) ** 2 * len(self._signal)
        ).long()
        noise = torch.randn_like(images)
        images = self._signal[levels] * images + self._noise[levels] * noise
        return pictures.float() / 127.5 - 1, images, levels

    def _variance(
        self, timesteps: Tensor, missed_image: Tensor, share: Tensor
    ) -> Tensor:
        """The bound in bits a value, as far as it depends on the variance.

        The first timestep has none: nothing is drawn after it.
        """
        small, large = self._small_log[timesteps], self._large_log[timesteps]
        log = (share + 1) / 2 * (large - small) + small
        # An estimate is limited to the image's range when it is drawn with.
        missed = self._of_image[timesteps] * missed_image.clamp(-2, 2)
        bits = (
            log - small + torch.exp(small - log) - 1 + missed.square() * torch.exp(-log)
        )
        bits = (bits / (2 * math.log(2))).mean((1, 2, 3))
        return _VARIANCE_WEIGHT * torch.where(timesteps > 0, bits, 0.0).mean()

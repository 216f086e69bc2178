"""Trains the UNet together with the text encoder, on latents."""

from dataclasses import dataclass

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel

from demo_world import captions, networks
from demo_world.training.schedule import (
    Schedule,
    autocast,
    compiled,
    descend,
    parameter_groups,
    parameters_of,
    set_learning_rate,
)

BATCH = 1024
LEARNING_RATE = 1.2e-3
AVERAGE_DECAY = 0.999
CAPTION_DROPOUT = 0.12
TWO_CHUNK_SHARE = 0.15
CLIP_SKIP_SHARE = 0.1
SNR_LIMIT = 5.0
#: Jobs ask for guidance 7, which suits a model of real photographs; a small world of clean
#: drawings overshoots there. The last part of the training therefore shrinks the difference
#: that a caption makes to this share, so that guidance 7 acts as 7 x this.
GUIDANCE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class LatentSet:
    """Scaled latents [N, 4, 16, 16] (half) with captions of one and of two chunks."""

    latents: Tensor
    tokens_1: Tensor
    weights_1: Tensor
    tokens_2: Tensor
    weights_2: Tensor
    strengths: Tensor

    def captions(self, chosen: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        tokens, weights = (
            (self.tokens_1, self.weights_1)
            if chunks == 1
            else (self.tokens_2, self.weights_2)
        )
        return tokens[chosen].int(), weights[chosen]


def empty_tokens(like: Tensor) -> Tensor:
    """The tokens [1, chunks * 77] of an empty prompt, as many chunks as `like` has."""
    empty = torch.full_like(like[:1], captions.END_TOKEN)
    empty[:, :: captions.CHUNK_LENGTH] = captions.BEGIN_TOKEN
    return empty


def drop_captions(
    tokens: Tensor, weights: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Empties a share of the captions, so that the model knows pictures without one."""
    empty = empty_tokens(tokens)
    dropped = torch.rand(len(tokens), 1, device=tokens.device) < share
    return torch.where(dropped, empty, tokens), torch.where(
        dropped, 1.0, weights.float()
    )


class NoiseTask:
    """Adds noise to latents and measures how well it is predicted."""

    def __init__(self, device: torch.device) -> None:
        self._signal, self._noise = (
            share.to(device) for share in networks.noise_shares()
        )
        snr = (self._signal / self._noise) ** 2
        weights = snr.clamp_max(SNR_LIMIT) / snr
        self._loss_weights = weights / weights.mean()

    def make(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [B, 4, 16, 16] -> noisy latents, timesteps [B], the noise."""
        steps = torch.randint(1000, (len(latents),), device=latents.device)
        noise = torch.randn_like(latents)
        signal, share = self._signal[steps], self._noise[steps]
        return (
            signal[:, None, None, None] * latents + share[:, None, None, None] * noise,
            steps,
            noise,
        )

    def loss(self, predicted: Tensor, target: Tensor, steps: Tensor) -> Tensor:
        error = (predicted.float() - target).square().mean((1, 2, 3))
        return (self._loss_weights[steps] * error).mean()


@torch.no_grad()
def softened_target(
    noise: Tensor, noisy: Tensor, timesteps: Tensor, tokens: Tensor, unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
) -> Tensor:  # fmt: skip
    """The noise, mixed with what the model predicts without a caption (see GUIDANCE_SHARE)."""
    empty = empty_tokens(tokens).expand_as(tokens)
    with autocast(noisy.device):
        context = networks.encode_text(text_encoder, empty, torch.ones_like(empty))
        uncaptioned = unet(noisy, timesteps, context).sample.float()
    return GUIDANCE_SHARE * noise + (1 - GUIDANCE_SHARE) * uncaptioned


def train_unet(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    data: LatentSet,
    steps: int,
    seconds: float,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
    teacher: tuple[UNet2DConditionModel, CLIPTextModel] | None = None,
) -> None:
    """Trains both in place and leaves the moving average of their weights in them.

    With a *teacher* (a frozen copy) captions are softened to GUIDANCE_SHARE.
    """
    device = data.latents.device
    networks.final_norm(text_encoder).requires_grad_(False)
    unet.train()
    text_encoder.train()
    groups = parameter_groups("embedding", unet, text_encoder)
    optimizer = torch.optim.AdamW(
        groups, learning_rate, (0.9, 0.99), fused=device.type == "cuda"
    )
    average = networks.MovingAverage(parameters_of(optimizer), AVERAGE_DECAY)
    task = NoiseTask(device)
    # Compiled for one chunk only: a second shape would cost another compilation.
    one_chunk_unet = compiled(unet, device)
    dice = torch.Generator().manual_seed(0)
    schedule = Schedule(steps, seconds)
    for step, progress in schedule:
        set_learning_rate(optimizer, step, progress, learning_rate)
        throws = torch.rand(2, generator=dice)
        chunks = 2 if throws[0] < TWO_CHUNK_SHARE else 1
        clip_skip = 2 if throws[1] < CLIP_SKIP_SHARE else 1
        chosen = torch.randint(len(data.latents), (batch,), device=device)
        noisy, timesteps, noise = task.make(data.latents[chosen].float())
        tokens, weights = drop_captions(*data.captions(chosen, chunks), CAPTION_DROPOUT)
        model = one_chunk_unet if chunks == 1 else unet
        target = (
            softened_target(noise, noisy, timesteps, tokens, *teacher)
            if teacher
            else noise
        )
        with autocast(device):
            context = networks.encode_text(text_encoder, tokens, weights, clip_skip)
            predicted = model(noisy, timesteps, context).sample
        loss = task.loss(predicted, target, timesteps)
        descend(optimizer, loss)
        average.update()
        schedule.report(step, loss=loss)
    average.copy_to_live()
    unet.eval()
    text_encoder.eval()

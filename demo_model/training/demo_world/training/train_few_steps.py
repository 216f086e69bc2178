"""Trains a LoRA with which the model draws in few steps without guidance.

One step of the student stands for several guided ones of the model itself, as in progressive
distillation (Salimans and Ho, https://arxiv.org/abs/2202.00512). Only captions are needed: the
pictures are the model's own.
"""

import copy
import random

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel

from demo_world import networks, world
from demo_world.captions import CaptionWriter
from demo_world.training.schedule import (
    Schedule,
    autocast,
    compiled,
    descend,
    set_learning_rate,
)
from demo_world.training.train_lora import LoraAdapters, LoraRecipe
from demo_world.training.train_unet import empty_tokens

#: kohya's LoCon: attention, feed-forward and convolutions of all blocks.
RECIPE = LoraRecipe("few-steps", 12, 12.0, r"^(down|mid|up)_block", (), 1.0)
STEPS = 4
TEACHER_STEPS = 4  # for each of the student's
GUIDANCE = 7.0
BATCH = 512
LEARNING_RATE = 2e-3
AVERAGE_DECAY = 0.995


class _Steps:
    """The student's steps and the teacher's finer ones: "trailing", the last level first."""

    def __init__(self, device: torch.device) -> None:
        signal, noise = networks.noise_shares()
        count = STEPS * TEACHER_STEPS
        self.timesteps = (
            torch.linspace(1000, 0, count + 1)[:-1].round().long().to(device) - 1
        )
        levels = (noise / signal).to(device)[self.timesteps]
        self.sigmas = torch.cat([levels, levels.new_zeros(1)])
        starts, ends = (
            self.sigmas[:-1:TEACHER_STEPS],
            self.sigmas[TEACHER_STEPS::TEACHER_STEPS],
        )
        weights = (starts - ends) / (ends**2 + 1).sqrt()
        self.loss_weights = weights / weights.mean()

    def predict(
        self,
        unet: UNet2DConditionModel,
        latents: Tensor,
        index: Tensor,
        context: Tensor,
    ) -> Tensor:
        """The noise in *latents* [B, 4, 16, 16], each at its own of the teacher's steps."""
        scale = (self.sigmas[index] ** 2 + 1).rsqrt()[:, None, None, None]
        predicted: Tensor = unet(latents * scale, self.timesteps[index], context).sample
        return predicted.float()

    def distance(self, start: Tensor, end: Tensor) -> Tensor:
        return (self.sigmas[end] - self.sigmas[start])[:, None, None, None]

    @torch.no_grad()
    def guided_end(
        self,
        unet: UNet2DConditionModel,
        latents: Tensor,
        first: Tensor,
        contexts: Tensor,
    ) -> Tensor:
        """*latents* after TEACHER_STEPS guided Euler steps; contexts [2 B]: captions, then none."""
        for index in (first + step for step in range(TEACHER_STEPS)):
            rows = self.predict(
                unet, latents.repeat(2, 1, 1, 1), index.repeat(2), contexts
            )
            captioned, uncaptioned = rows.chunk(2)
            noise = uncaptioned + GUIDANCE * (captioned - uncaptioned)
            latents = latents + self.distance(index, index + 1) * noise
        return latents


class _Drawings:
    """Pictures on their way, each at its own of the student's steps; a finished one is renewed."""

    def __init__(
        self, tokens: Tensor, weights: Tensor, batch: int, highest_sigma: float
    ) -> None:
        self._tokens, self._weights = tokens, weights
        self._highest_sigma = highest_sigma
        # Below 0: waits, so that not all are at the same step.
        self._step = -(torch.arange(batch, device=tokens.device) % STEPS)
        self.latents = torch.zeros(batch, 4, 16, 16, device=tokens.device)
        self._caption = torch.zeros_like(self._step)
        self._renew()

    @property
    def step(self) -> Tensor:
        return self._step.clamp(min=0)

    def captions(self) -> tuple[Tensor, Tensor]:
        return self._tokens[self._caption], self._weights[self._caption]

    def move(self, latents: Tensor) -> None:
        self._step = torch.where(self._step == STEPS - 1, 0, self._step + 1)
        self.latents = latents
        self._renew()

    def _renew(self) -> None:
        new = self._step <= 0
        noise = self._highest_sigma * torch.randn_like(self.latents)
        self.latents = torch.where(new[:, None, None, None], noise, self.latents)
        caption = torch.randint_like(self._caption, len(self._tokens))
        self._caption = torch.where(new, caption, self._caption)


def write_captions(
    writer: CaptionWriter, count: int, chunks: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and weights [count, chunks * 77] of scenes that training may show."""
    rng = random.Random(chunks)
    written = [writer.write(world.sample_scene(rng), rng, chunks) for _ in range(count)]
    tokens = torch.stack([torch.from_numpy(row[0].astype("int32")) for row in written])
    weights = torch.stack([torch.from_numpy(row[1]) for row in written])
    return tokens.to(device), weights.float().to(device)


def train_few_steps(
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    writer: CaptionWriter,
    captions: int,
    steps: int,
    seconds: float,
    batch: int = BATCH,
) -> LoraAdapters:
    """Half of the latents go on from the student's own, so that it learns to mend its errors."""
    device = unet.device
    unet.requires_grad_(False)
    text_encoder.requires_grad_(False)
    teacher = copy.deepcopy(unet)
    one_chunk_teacher = compiled(teacher, device)
    lora = LoraAdapters(RECIPE, unet, None).to(device)
    lora.strengths = torch.ones(1, device=device)
    parameters = list(lora.parameters())
    optimizer = torch.optim.AdamW(
        parameters, LEARNING_RATE, (0.9, 0.99), weight_decay=1e-3
    )
    average = networks.MovingAverage(parameters, AVERAGE_DECAY)
    table = _Steps(device)
    drawings = [
        _Drawings(
            *write_captions(writer, captions, chunks, device),
            batch,
            float(table.sigmas[0]),
        )
        for chunks in (1, 2)
    ]
    schedule = Schedule(steps, seconds)
    for step, progress in schedule:
        set_learning_rate(optimizer, step, progress, LEARNING_RATE)
        chunks = 2 if step % 6 == 5 else 1
        drawn = drawings[chunks - 1]
        tokens, weights = drawn.captions()
        with torch.no_grad():
            context = networks.encode_text(text_encoder, tokens, weights)
            empty = empty_tokens(tokens)
            empty_context = networks.encode_text(
                text_encoder, empty, torch.ones_like(empty)
            )
        latents, first = drawn.latents, drawn.step * TEACHER_STEPS
        contexts = torch.cat([context, empty_context.expand_as(context)])
        guide = one_chunk_teacher if chunks == 1 else teacher
        wanted_end = table.guided_end(guide, latents, first, contexts)
        distance = table.distance(first, first + TEACHER_STEPS)
        with autocast(device):
            predicted = table.predict(unet, latents, first, context)
        error = (predicted - (wanted_end - latents) / distance).square().mean((1, 2, 3))
        loss = (table.loss_weights[drawn.step] * error).mean()
        descend(optimizer, loss)
        average.update()
        errors = torch.zeros(STEPS, device=device).index_add_(
            0, drawn.step, error.detach()
        )
        errors /= drawn.step.bincount(minlength=STEPS).clamp(min=1)
        schedule.report(
            step,
            loss=loss.detach(),
            **{f"step_{n + 1}": errors[n] for n in range(STEPS)},
        )
        own_end = latents + distance * predicted.detach()
        own = torch.rand(batch, 1, 1, 1, device=device) < 0.5
        drawn.move(torch.where(own, own_end, wanted_end))
    average.copy_to_live()
    lora.detach()
    return lora

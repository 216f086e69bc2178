"""Trains the judge on drawn pictures, a quarter of them seen through the autoencoder."""

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from demo_world import answers
from demo_world.shapes import SHAPES
from demo_world.training import train_vae
from demo_world.training.schedule import Schedule, autocast, descend, set_learning_rate
from demo_world.world import COLOURS
from evaluation.score.demo.judge import Judge

BATCH = 256
LEARNING_RATE = 2e-3
MOST_PIXEL_NOISE = 0.06


def _through_vae(vae: AutoencoderKL, images: Tensor) -> Tensor:
    latents = train_vae.encode(vae, images)
    noise = (
        0.25 * torch.rand(len(latents), 1, 1, 1, device=latents.device) * latents.std()
    )
    return train_vae.decode(vae, latents + noise * torch.randn_like(latents))


def train_judge(
    images: Tensor, labels: Tensor, vae: AutoencoderKL, steps: int, seconds: float,
    batch: int = BATCH,
) -> Judge:  # fmt: skip
    """Trains on images [N, 128, 128, 3] uint8 with labels [N, 2, 32, 32] uint8."""
    device = images.device
    judge = Judge(tuple(SHAPES), tuple(COLOURS)).to(device)
    optimizer = torch.optim.AdamW(judge.parameters(), LEARNING_RATE, weight_decay=1e-3)
    schedule = Schedule(steps, seconds)
    seen_through_vae = batch // 4
    for step, progress in schedule:
        set_learning_rate(optimizer, step, progress, LEARNING_RATE)
        chosen = torch.randint(len(images), (batch,), device=device)
        drawn = images[chosen[seen_through_vae:]].permute(0, 3, 1, 2).float() / 255
        blurred = _through_vae(vae, images[chosen[:seen_through_vae]])
        pictures = torch.cat([blurred, drawn])
        noise = MOST_PIXEL_NOISE * torch.rand(batch, 1, 1, 1, device=device)
        gain = 0.85 + 0.3 * torch.rand(batch, 1, 1, 1, device=device)
        pictures = pictures * gain + noise * torch.randn_like(pictures)
        objects, colours = labels[chosen, 0].long(), labels[chosen, 1].long()
        with autocast(device):
            object_logits, colour_logits = judge(pictures)
        object_loss = functional.cross_entropy(object_logits.float(), objects)
        # Cells without an object have no colour: label 0 becomes -1 and is left out.
        colour_loss = functional.cross_entropy(
            colour_logits.float(), colours - 1, ignore_index=-1
        )
        loss = object_loss + 0.3 * colour_loss
        descend(optimizer, loss)
        schedule.report(step, objects=object_loss, colours=colour_loss)
    return judge.eval()


@torch.no_grad()
def judge_accuracy(judge: Judge, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Share of drawn pictures whose objects are all found, and whose colours are all right."""
    objects_right = colours_right = 0
    for start in range(0, len(images), 256):
        batch = images[start : start + 256].permute(0, 3, 1, 2).float() / 255
        for findings, truth in zip(
            answers.find(judge, batch),
            labels[start : start + 256].cpu().numpy(),
            strict=True,
        ):
            shapes = {
                judge.shapes[n - 1] for n in set(truth[0].flatten().tolist()) - {0}
            }
            colours = {
                judge.colours[n - 1] for n in set(truth[1].flatten().tolist()) - {0}
            }
            objects_right += shapes == {finding.shape for finding in findings}
            colours_right += colours == {finding.colour for finding in findings}
    return objects_right / len(images), colours_right / len(images)

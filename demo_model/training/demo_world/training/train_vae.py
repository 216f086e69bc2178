"""Trains the autoencoder, and turns pictures into latents with it."""

import torch
from diffusers import AutoencoderKL
from diffusers.models import upsampling
from torch import Tensor
from torch.nn import functional

from demo_world import networks
from demo_world.training.schedule import Schedule, autocast, compiled, set_learning_rate

# Its check of torch's version would cut the compiled graph in pieces; torch here is newer.
upsampling.is_torch_version = lambda *_: False

BATCH = 96
LEARNING_RATE = 1.5e-3
EDGE_WEIGHT = 1.0
KL_WEIGHT = 3e-5
#: The decoder learns to forgive this much noise (a share of the latents' spread), because
#: sampled latents are never as clean as encoded ones.
MOST_LATENT_NOISE = 0.06


def to_signed(images: Tensor) -> Tensor:
    """[B, H, W, 3] uint8 -> [B, 3, H, W] in -1..1."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def _edge_loss(output: Tensor, target: Tensor) -> Tensor:
    across = (output.diff(dim=3) - target.diff(dim=3)).abs().mean()
    down = (output.diff(dim=2) - target.diff(dim=2)).abs().mean()
    return across + down


def train_vae(
    images: Tensor, steps: int, seconds: float, batch: int = BATCH
) -> tuple[AutoencoderKL, float]:
    """Trains on images [N, 128, 128, 3] uint8; returns the model and its last L1 error."""
    device = images.device
    vae = networks.build_vae().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        vae.parameters(), LEARNING_RATE, (0.9, 0.99), weight_decay=1e-4,
        fused=device.type == "cuda",
    )  # fmt: skip

    def reconstruct(pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        posterior = vae.encode(pictures).latent_dist
        mean = posterior.mean
        noise_level = posterior.std + (
            MOST_LATENT_NOISE
            * mean.detach().std()
            * torch.rand_like(mean[:, :1, :1, :1])
        )
        latents = mean + noise_level * torch.randn_like(mean)
        kl = 0.5 * (mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return vae.decode(latents).sample, kl, mean

    reconstruct = compiled(reconstruct, device)
    schedule = Schedule(steps, seconds)
    absolute = torch.zeros((), device=device)
    for step, progress in schedule:
        set_learning_rate(optimizer, step, progress, LEARNING_RATE)
        chosen = torch.randint(len(images), (batch,), device=device)
        pictures = to_signed(images[chosen]).contiguous(
            memory_format=torch.channels_last
        )
        with autocast(device):
            output, kl, mean = reconstruct(pictures)
        output = output.float()
        absolute = (output - pictures).abs().mean()
        squared = functional.mse_loss(output, pictures)
        loss = (
            absolute
            + squared
            + EDGE_WEIGHT * _edge_loss(output, pictures)
            + KL_WEIGHT * kl
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.report(step, absolute=absolute, kl=kl, spread=mean.std())
    vae = vae.eval()
    vae.register_to_config(scaling_factor=float(1 / encode(vae, images[:4096]).std()))
    return vae, float(absolute)


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor, batch: int = 1024) -> Tensor:
    """[N, 128, 128, 3] uint8 -> latents [N, 4, 16, 16], not yet scaled."""
    latents = []
    for start in range(0, len(images), batch):
        pictures = to_signed(images[start : start + batch].to(vae.device))
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        with autocast(vae.device):
            latents.append(vae.encode(pictures).latent_dist.mean.float())
    return torch.cat(latents)


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor, batch: int = 512) -> Tensor:
    """Latents [N, 4, 16, 16], not scaled -> [N, 3, 128, 128] in 0..1."""
    images = []
    for start in range(0, len(latents), batch):
        with autocast(vae.device):
            sample = vae.decode(latents[start : start + batch]).sample
        images.append((sample.float() / 2 + 0.5).clamp(0, 1))
    return torch.cat(images)

"""A full-size SD1.5 with random weights, and LoRAs for it: as fast as a trained one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from worker.engine import checkpoint
from worker.engine.lora import names as lora_names

#: kohya's default LoRA adapts these twelve layers in each of the UNet's sixteen transformers.
_ADAPTED_SUFFIXES = (
    *("proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *(f"attn{number}.to_{part}" for number in (1, 2) for part in ("q", "k", "v", "out.0")),
)


def build_random_checkpoint(folder: Path, device: torch.device) -> Path:
    """Writes SD1.5 with random float16 weights in diffusers' format; returns its folder, 2 GB.

    Takes a second on a GPU, a minute on a CPU.
    """
    checkpoint.hide_progress_bars()
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(0)
        networks: dict[str, Any] = {
            "unet": UNet2DConditionModel(**checkpoint.UNET_CONFIG),
            "vae": AutoencoderKL(**checkpoint.VAE_CONFIG),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**checkpoint.TEXT_CONFIG)),
        }
    raise_mean(networks["text_encoder"])
    for part, network in networks.items():
        network.half().save_pretrained(folder / part)
    return folder


def build_random_loras(
    folder: Path, model: Path, count: int, device: torch.device, *, rank: int = 32
) -> list[str]:
    """Writes LoRAs in kohya's format for the UNet of a checkpoint; returns their names.

    They change the linear layers of its transformers, 192 in SD1.5: 27 MB each at rank 32.
    """
    config = checkpoint.network_config(model / "unet", checkpoint.UNET_CONFIG)
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    layers = {
        f"lora_unet_{path.replace('.', '_')}": layer
        for path, layer in lora_names.adaptable_layers(unet).items()
        if path.endswith(_ADAPTED_SUFFIXES)
    }
    generator = torch.Generator(device).manual_seed(0)
    names = [f"random-{number:03}" for number in range(count)]
    for name in names:
        path = folder / f"{name}.safetensors"
        write_lora(path, layers, rank, float(rank), generator, torch.float16)
    return names


def write_lora(
    path: Path,
    layers: Mapping[str, Any],
    rank: int,
    alpha: float,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes a random LoRA in kohya's format for linear and 1x1 layers, given by key."""
    device = generator.device
    tensors = {}
    for key, layer in layers.items():
        outer, inner, *kernel = layer.weight.shape
        down = torch.randn((rank, inner, *kernel), generator=generator, device=device)
        up = torch.randn((outer, rank, *kernel), generator=generator, device=device)
        tensors[f"{key}.lora_down.weight"] = (down / inner**0.5).to("cpu", dtype)
        tensors[f"{key}.lora_up.weight"] = (up / rank**0.5).to("cpu", dtype)
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def raise_mean(text_encoder: CLIPTextModel) -> None:
    """Gives an untrained text encoder's output a mean other than 0: prompt weights divide by it."""
    for path, module in text_encoder.named_modules():
        if path.endswith("final_layer_norm"):
            nn.init.constant_(module.bias, 0.1)

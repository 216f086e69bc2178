"""SD1.5 at its full size with random weights, and LoRAs for it: what speed is measured on.

A picture of it shows nothing, but takes as long as any other: no weight is zero.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from fleet.bench import tiny_model
from worker.engine import checkpoint, text
from worker.engine.lora import names as lora_names

#: A LoRA of kohya's default adapts these twelve of each transformer; SD1.5's UNet has sixteen.
_ADAPTED_SUFFIXES = (
    *("proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *(f"attn{number}.to_{part}" for number in (1, 2) for part in ("q", "k", "v", "out.0")),
)


def build_random_checkpoint(
    folder: Path, device: torch.device, *, tokenizer: Path | None = None, seed: int = 0
) -> Path:
    """Writes SD1.5 with random float16 weights in diffusers' format; returns its folder, 2 GB.

    The weights are drawn on *device*: a GPU takes a second, a CPU a minute. *tokenizer* is the
    folder of SD1.5's own; without one every text is spelled out, letter by letter.
    """
    checkpoint.hide_progress_bars()
    tiny_model.build_tiny_checkpoint(folder)
    if tokenizer is not None:
        shutil.rmtree(folder / "tokenizer")
        shutil.copytree(tokenizer, folder / "tokenizer")
    for part in ("unet", "vae", "text_encoder"):
        shutil.rmtree(folder / part)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(seed)
        _save(UNet2DConditionModel(**checkpoint.UNET_CONFIG), folder / "unet")
        _save(AutoencoderKL(**checkpoint.VAE_CONFIG), folder / "vae")
        text_encoder = CLIPTextModel(CLIPTextConfig(**checkpoint.TEXT_CONFIG))
        tiny_model.raise_mean(text_encoder)
        _save(text_encoder, folder / "text_encoder")
    return folder


def build_random_loras(
    folder: Path, model: Path, count: int, device: torch.device, *, rank: int = 32
) -> list[str]:
    """Writes LoRAs in kohya's format for the UNet of a checkpoint; returns their names.

    They change the linear layers of its transformers, SD1.5's 192: 27 MB each at rank 32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = _adapted_layers(model)
    generator = torch.Generator(device).manual_seed(0)
    names = [f"random-{number:03}" for number in range(count)]
    for name in names:
        tensors = {}
        for path, layer in layers.items():
            key = f"lora_unet_{path.replace('.', '_')}"
            outer, inner, *kernel = layer.weight.shape  # 1x1 convolutions count as linear
            down = torch.randn((rank, inner, *kernel), generator=generator, device=device)
            up = torch.randn((outer, rank, *kernel), generator=generator, device=device)
            tensors[f"{key}.lora_down.weight"] = (down / inner**0.5).half().cpu()
            tensors[f"{key}.lora_up.weight"] = (up / rank**0.5).half().cpu()
            tensors[f"{key}.alpha"] = torch.tensor(float(rank))
        save_file(tensors, folder / f"{name}.safetensors")
    return names


def cut_to_chunks(tokenizer: Path, words: str, chunks: int) -> str:
    """As much of the start of *words* as the tokenizer in a folder puts into so many chunks."""
    tokens = text.Tokenizer(checkpoint.read_tokenizer(tokenizer))
    parts = words.split(" ")
    while len(parts) > 1 and len(tokens.chunks(" ".join(parts))) > chunks:
        parts.pop()
    return " ".join(parts)


def _save(network: Any, folder: Path) -> None:
    network.half().save_pretrained(folder)


def _adapted_layers(model: Path) -> dict[str, nn.Linear | nn.Conv2d]:
    config = checkpoint.network_config(model / "unet", checkpoint.UNET_CONFIG)
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    return {
        path: layer
        for path, layer in lora_names.adaptable_layers(unet).items()
        if path.endswith(_ADAPTED_SUFFIXES)
    }

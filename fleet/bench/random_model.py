"""A full-size SD1.5 with random weights, and LoRAs for it: as fast as a trained one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from fleet.bench import tiny_model
from worker.engine import checkpoint, text
from worker.engine.lora import names as lora_names

#: kohya's default LoRA adapts these twelve layers in each of the UNet's sixteen transformers.
_ADAPTED_SUFFIXES = (
    *("proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *(f"attn{number}.to_{part}" for number in (1, 2) for part in ("q", "k", "v", "out.0")),
)


def build_random_checkpoint(
    folder: Path, device: torch.device, *, tokenizer: Path | None = None, seed: int = 0
) -> Path:
    """Writes SD1.5 with random float16 weights in diffusers' format; returns its folder, 2 GB.

    Takes a second on a GPU, a minute on a CPU. *tokenizer* is the folder of SD1.5's; by default
    every letter is a token.
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
        tiny_model.write_lora(path, layers, rank, float(rank), generator, torch.float16)
    return names


def cut_to_chunks(tokenizer: Path, words: str, chunks: int) -> str:
    """The start of *words* that fits into *chunks* with the tokenizer in a folder."""
    tokens = text.Tokenizer(checkpoint.read_tokenizer(tokenizer))
    parts = words.split(" ")
    while len(parts) > 1 and len(tokens.chunks(" ".join(parts))) > chunks:
        parts.pop()
    return " ".join(parts)


def _save(network: Any, folder: Path) -> None:
    network.half().save_pretrained(folder)

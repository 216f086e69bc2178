"""Full-size checkpoints with random weights, and LoRAs for them: as fast as trained ones."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Generator, Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
from transformers.utils import logging

from worker.engine.families import reading
from worker.engine.families.table import SD1, Family
from worker.engine.flow import checkpoint as flows
from worker.engine.lora import file as lora_names

#: kohya's default LoRA adapts these twelve layers in each of the UNet's sixteen transformers.
ADAPTED_SUFFIXES = (
    "proj_in",
    "proj_out",
    "ff.net.0.proj",
    "ff.net.2",
    *(
        f"attn{number}.to_{part}"
        for number in (1, 2)
        for part in ("q", "k", "v", "out.0")
    ),
)

_PIXELS_PER_LATENT = 8

Shape = tuple[int, ...]
Tensors = dict[str, Tensor]


def build_random_checkpoint(
    folder: Path,
    device: torch.device,
    family: Family = SD1,
    *,
    prediction_type: str = "epsilon",
) -> Path:
    """Writes a model family with random float16 weights in diffusers' format; returns its folder.

    SD1.5 takes 2 GB and a second on a GPU, a minute on a CPU; SDXL 7 GB.
    """
    logging.disable_progress_bar()
    gpus = [device] if device.type == "cuda" else []
    side = family.native_sides.get(prediction_type)
    size = {"sample_size": side // _PIXELS_PER_LATENT} if side else {}
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(0)
        networks = {
            "unet": UNet2DConditionModel(**{**family.unet_config, **size}),
            "vae": AutoencoderKL(**family.vae_config),
        }
        for encoder in family.text_encoders:
            projected = (
                CLIPTextModelWithProjection
                if encoder.rules.has_pooled
                else CLIPTextModel
            )
            networks[encoder.network] = projected(CLIPTextConfig(**encoder.config))
            raise_mean(networks[encoder.network])
    for part, network in networks.items():
        network.half().save_pretrained(folder / part)
    if prediction_type != "epsilon":
        path = folder / "scheduler" / "scheduler_config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"prediction_type": prediction_type}))
    return folder


def build_random_loras(
    folder: Path, model: Path, count: int, device: torch.device, *, rank: int = 32
) -> list[str]:
    """Writes LoRAs in kohya's format for what draws in a checkpoint; returns their names.

    They change the linear layers of its transformers, 192 in SD1.5: 27 MB each at rank 32.
    """

    def make(_path: str, layer: Any, generator: Generator) -> tuple[Tensors, int]:
        return lora(tuple(layer.weight.shape), rank, generator), rank

    return write_loras(
        folder, f"random-lora-{rank}", count, adapted_layers(model), make, device
    )


def adapted_layers(
    model: Path, suffixes: tuple[str, ...] = ADAPTED_SUFFIXES
) -> dict[str, Any]:
    """The layers of a checkpoint's UNet whose paths end so, or of a flow's blocks; on meta."""
    flow = flows.family_of(model)
    family = flow or SD1
    kind = UNet2DConditionModel if flow is None else flow.network
    config = reading.network_config(model / family.backbone, family.unet_config)
    layers = lora_names.adaptable_layers(reading.build(kind, config)).items()
    if flow is not None:
        return {path: layer for path, layer in layers if "_blocks." in path}
    return {path: layer for path, layer in layers if path.endswith(suffixes)}


def write_loras(
    folder: Path,
    name: str,
    count: int,
    layers: Mapping[str, Any],
    make: Callable[[str, Any, Generator], tuple[Tensors, int]],
    device: torch.device,
) -> list[str]:
    """Writes LoRAs of what *make* gives for each layer, with its rank; returns their names."""
    generator = Generator(device).manual_seed(0)
    names = [f"{name}-{number:03}" for number in range(count)]
    for file in names:
        tensors = {}
        for path, layer in layers.items():
            key = f"lora_unet_{path.replace('.', '_')}"
            parts, rank = make(path, layer, generator)
            for part, tensor in parts.items():
                tensors[f"{key}.{part}"] = tensor.cpu().half()
            tensors[f"{key}.alpha"] = torch.tensor(float(rank))
        _save(folder / f"{file}.safetensors", tensors)
    return names


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def lora(shape: Shape, rank: int, generator: Generator) -> Tensors:
    outer, inner, *kernel = shape
    ones = [1] * len(kernel)
    inputs = inner * math.prod(kernel)
    return {
        "lora_down.weight": noise(generator, rank, inner, *kernel) / inputs**0.5,
        "lora_up.weight": noise(generator, outer, rank, *ones) / rank**0.5,
    }


def noise(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def raise_mean(text_encoder: nn.Module) -> None:
    """Gives an untrained text encoder's output a mean other than 0: prompt weights divide by it."""
    for path, module in text_encoder.named_modules():
        if path.endswith("final_layer_norm"):
            nn.init.constant_(module.bias, 0.1)

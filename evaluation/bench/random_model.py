"""Full-size checkpoints with random weights, and LoRAs for them: as fast as trained ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from worker.engine import checkpoint
from worker.engine.families import reading
from worker.engine.families.table import SD1, Family
from worker.engine.lora import layout as lora_names

#: kohya's default LoRA adapts these twelve layers in each of the UNet's sixteen transformers.
_ADAPTED_SUFFIXES = (
    *("proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *(f"attn{number}.to_{part}" for number in (1, 2) for part in ("q", "k", "v", "out.0")),
)

#: What kohya's LoCons adapt beside them, in resnets and samplers.
_LOCON_SUFFIXES = ("conv1", "conv2", "conv_shortcut", "time_emb_proj", "samplers.0.conv")

_PIXELS_PER_LATENT = 8

LoraFormat = Literal["lora", "locon", "loha", "lokr", "dora"]
Shape = tuple[int, ...]
Tensors = dict[str, torch.Tensor]


def build_random_checkpoint(
    folder: Path, device: torch.device, family: Family = SD1, *, prediction_type: str = "epsilon"
) -> Path:
    """Writes a model family with random float16 weights in diffusers' format; returns its folder.

    SD1.5 takes 2 GB and a second on a GPU, a minute on a CPU; SDXL 7 GB.
    """
    checkpoint.hide_progress_bars()
    gpus = [device] if device.type == "cuda" else []
    side = family.native_sides.get(prediction_type)
    size = {"sample_size": side // _PIXELS_PER_LATENT} if side else {}
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(0)
        networks: dict[str, Any] = {
            "unet": UNet2DConditionModel(**{**family.unet_config, **size}),
            "vae": AutoencoderKL(**family.vae_config),
        }
        for encoder in family.text_encoders:
            projected = CLIPTextModelWithProjection if encoder.rules.has_pooled else CLIPTextModel
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
    folder: Path,
    model: Path,
    count: int,
    device: torch.device,
    *,
    rank: int = 32,
    kind: LoraFormat = "lora",
    convolution_rank: int = 16,
) -> list[str]:
    """Writes LoRAs in kohya's and LyCORIS' formats for a checkpoint's UNet; returns their names.

    They change the linear layers of its transformers, 192 in SD1.5: 27 MB each at rank 32. A
    "locon" also changes its resnets and samplers, convolutions at *convolution_rank*.
    """
    config = reading.network_config(model / "unet", SD1.unet_config)
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    suffixes = _ADAPTED_SUFFIXES + (_LOCON_SUFFIXES if kind == "locon" else ())
    layers = {
        path: (layer, convolution_rank if of_locon else rank)
        for path, layer in lora_names.adaptable_layers(unet).items()
        for of_locon in [path.endswith(_LOCON_SUFFIXES) and isinstance(layer, nn.Conv2d)]
        if path.endswith(suffixes)
    }
    norms = _norms(model / "unet") if kind == "dora" else {}
    generator = torch.Generator(device).manual_seed(0)
    names = [f"random-{kind}-{rank}-{number:03}" for number in range(count)]
    for name in names:
        tensors = {}
        for path, (layer, layer_rank) in layers.items():
            key = f"lora_unet_{path.replace('.', '_')}"
            parts = MAKERS[kind](tuple(layer.weight.shape), layer_rank, generator)
            for part, tensor in parts.items():
                of_layer = norms[path] if part == "dora_scale" else 1.0
                tensors[f"{key}.{part}"] = (tensor.cpu() * of_layer).half()
            tensors[f"{key}.alpha"] = torch.tensor(float(layer_rank))
        _save(folder / f"{name}.safetensors", tensors)
    return names


def write_lora(
    path: Path, layers: Mapping[str, Any], rank: int, alpha: float, generator: torch.Generator
) -> None:
    """Writes a random LoRA in kohya's format for layers given by key, in float32."""
    tensors = {}
    for key, layer in layers.items():
        for part, tensor in _lora(tuple(layer.weight.shape), rank, generator).items():
            tensors[f"{key}.{part}"] = tensor.cpu()
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
    _save(path, tensors)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _lora(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    outer, inner, *kernel = shape
    down = _noise(generator, rank, inner, *kernel) / (inner * math.prod(kernel)) ** 0.5
    up = _noise(generator, outer, rank, *[1] * len(kernel)) / rank**0.5
    return {"lora_down.weight": down, "lora_up.weight": up}


def _dora(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    """Norms within a tenth of 1, for a layer whose outputs' weights have norms of 1."""
    norms = 0.9 + 0.2 * torch.rand((shape[0], 1), generator=generator, device=generator.device)
    return {**_lora(shape, rank, generator), "dora_scale": norms.view(-1, *[1] * (len(shape) - 1))}


def _norms(folder: Path) -> Tensors:
    """The norms [out, 1, ...] of a network's weights, by the layers' paths."""
    norms = {}
    for file in folder.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            if weight.dim() > 1:
                norm = weight.float().flatten(1).norm(dim=1)
                norms[name.removesuffix(".weight")] = norm.view(-1, *[1] * (weight.dim() - 1))
    return norms


def _loha(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    outer, inner, *kernel = shape
    inputs = inner * math.prod(kernel)
    tensors = {}
    for half in ("1", "2"):
        tensors[f"hada_w{half}_a"] = _noise(generator, outer, rank) / rank**0.5
        tensors[f"hada_w{half}_b"] = _noise(generator, rank, inputs) / inputs**0.25
    return tensors


def _lokr(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    """Factors as square as possible, and only the larger one of low rank: LyCORIS' defaults."""
    outer, inner, *_ = shape
    (small_out, large_out), (small_in, large_in) = _halves(outer), _halves(inner)
    tensors = {"lokr_w1": _noise(generator, small_out, small_in) / small_in**0.5}
    if 2 * rank < max(large_out, large_in):
        tensors["lokr_w2_a"] = _noise(generator, large_out, rank) / rank**0.5
        tensors["lokr_w2_b"] = _noise(generator, rank, large_in) / large_in**0.5
    else:
        tensors["lokr_w2"] = _noise(generator, large_out, large_in) / large_in**0.5
    return tensors


def _halves(size: int) -> tuple[int, int]:
    """The two factors of *size* that are nearest to its root, the smaller one first."""
    small = next(each for each in range(math.isqrt(size), 0, -1) if size % each == 0)
    return small, size // small


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


#: Make one layer's tensors for its weight's shape and a rank.
MAKERS: Mapping[LoraFormat, Callable[[Shape, int, torch.Generator], Tensors]] = {
    "lora": _lora,
    "locon": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "dora": _dora,
}


def raise_mean(text_encoder: nn.Module) -> None:
    """Gives an untrained text encoder's output a mean other than 0: prompt weights divide by it."""
    for path, module in text_encoder.named_modules():
        if path.endswith("final_layer_norm"):
            nn.init.constant_(module.bias, 0.1)

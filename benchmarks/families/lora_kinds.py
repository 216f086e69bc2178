"""Random LoRAs of all kinds, in kohya's and LyCORIS' formats."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import nn

from evaluation.bench import random_model
from evaluation.bench.random_model import Shape, Tensors

#: What kohya's LoCons adapt beside them, in resnets and samplers.
_LOCON_SUFFIXES = (
    "conv1",
    "conv2",
    "conv_shortcut",
    "time_emb_proj",
    "samplers.0.conv",
)

LoraFormat = Literal["lora", "locon", "loha", "lokr", "dora"]


def build(
    folder: Path,
    model: Path,
    count: int,
    device: torch.device,
    *,
    rank: int = 32,
    kind: LoraFormat = "lora",
    convolution_rank: int = 16,
) -> list[str]:
    """Writes LoRAs for a checkpoint's UNet; returns their names.

    A "locon" also changes its resnets and samplers, convolutions at *convolution_rank*.
    """
    locon = _LOCON_SUFFIXES if kind == "locon" else ()
    layers = random_model.adapted_layers(model, random_model.ADAPTED_SUFFIXES + locon)
    norms = _norms(model / "unet") if kind == "dora" else {}

    def make(
        path: str, layer: nn.Module, generator: torch.Generator
    ) -> tuple[Tensors, int]:
        is_convolution = path.endswith(_LOCON_SUFFIXES) and isinstance(layer, nn.Conv2d)
        own = convolution_rank if is_convolution else rank
        parts = MAKERS[kind](tuple(layer.weight.shape), own, generator)
        if "dora_scale" in parts:
            parts["dora_scale"] = parts["dora_scale"].cpu() * norms[path]
        return parts, own

    name = f"random-{kind}-{rank}"
    return random_model.write_loras(folder, name, count, layers, make, device)


def build_linked(
    folder: Path,
    model: Path,
    count: int,
    device: torch.device,
    *,
    rank: int = 32,
    kind: LoraFormat = "lora",
) -> list[str]:
    """Writes one LoRA and links it, which to an engine are as many files; returns their names.

    What an earlier run has written stays.
    """
    first = folder / f"random-{kind}-{rank}-000.safetensors"
    if not first.exists():
        build(folder, model, 1, device, rank=rank, kind=kind)
    links = [first.with_stem(f"{first.stem}-{number}") for number in range(count)]
    for link in links:
        if not link.exists():
            link.hardlink_to(first)
    return [link.stem for link in links]


def _dora(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    """Norms within a tenth of 1, for a layer whose outputs' weights have norms of 1."""
    norms = 0.9 + 0.2 * torch.rand(
        (shape[0], 1), generator=generator, device=generator.device
    )
    return {
        **random_model.lora(shape, rank, generator),
        "dora_scale": norms.view(-1, *[1] * (len(shape) - 1)),
    }


def _norms(folder: Path) -> Tensors:
    """The norms [out, 1, ...] of a network's weights, by the layers' paths."""
    norms = {}
    for file in folder.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            if weight.dim() > 1:
                norm = weight.float().flatten(1).norm(dim=1)
                norms[name.removesuffix(".weight")] = norm.view(
                    -1, *[1] * (weight.dim() - 1)
                )
    return norms


def _loha(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    outer, inner, *kernel = shape
    inputs = inner * math.prod(kernel)
    tensors = {}
    for half in ("1", "2"):
        tensors[f"hada_w{half}_a"] = (
            random_model.noise(generator, outer, rank) / rank**0.5
        )
        tensors[f"hada_w{half}_b"] = (
            random_model.noise(generator, rank, inputs) / inputs**0.25
        )
    return tensors


def _lokr(shape: Shape, rank: int, generator: torch.Generator) -> Tensors:
    """Factors as square as possible, and only the larger one of low rank: LyCORIS' defaults."""
    outer, inner, *_ = shape
    (small_out, large_out), (small_in, large_in) = _halves(outer), _halves(inner)
    tensors = {
        "lokr_w1": random_model.noise(generator, small_out, small_in) / small_in**0.5
    }
    if 2 * rank < max(large_out, large_in):
        tensors["lokr_w2_a"] = (
            random_model.noise(generator, large_out, rank) / rank**0.5
        )
        tensors["lokr_w2_b"] = (
            random_model.noise(generator, rank, large_in) / large_in**0.5
        )
    else:
        tensors["lokr_w2"] = (
            random_model.noise(generator, large_out, large_in) / large_in**0.5
        )
    return tensors


def _halves(size: int) -> tuple[int, int]:
    """The two factors of *size* that are nearest to its root, the smaller one first."""
    candidates = range(math.isqrt(size), 0, -1)
    small = next(side for side in candidates if size % side == 0)
    return small, size // small


#: Make one layer's tensors for its weight's shape and a rank.
MAKERS: Mapping[LoraFormat, Callable[[Shape, int, torch.Generator], Tensors]] = {
    "lora": random_model.lora,
    "locon": random_model.lora,
    "loha": _loha,
    "lokr": _lokr,
    "dora": _dora,
}

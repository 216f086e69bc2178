"""FLUX.2-klein-4B at full size with random weights, and LoRAs for it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from imagefleet.validation import JSONDict
from klein import tiny_klein
from worker.engine import contract
from worker.engine.flow.families import KLEIN

#: Qwen3-4B's, without the layers that klein does not read.
_ENCODER: JSONDict = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

#: A trained LoRA changes weights by some hundredths.
_STRENGTH = 0.05

#: A LoRA's kind and rank.
Kind = tuple[str, int]


def build(folder: Path, device: torch.device, *, is_tiny: bool) -> Path:
    """Writes the model once, in bfloat16; returns its folder."""
    if (folder / "model_index.json").exists():
        return folder
    if is_tiny:
        return tiny_klein.build(folder)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(0)
        networks: list[Any] = [
            Flux2Transformer2DModel(**KLEIN.unet_config),
            AutoencoderKLFlux2(),
            Qwen3ForCausalLM(Qwen3Config(**_ENCODER)),
        ]
    tiny_klein.save(
        folder, *(each.bfloat16().eval() for each in networks), is_distilled=True
    )
    return folder


def write_loras(
    folder: Path, model: Path, kind: Kind, count: int, device: torch.device
) -> list[Path]:
    """One file of a kind under many names: an engine takes them for different ones."""
    folder.mkdir(parents=True, exist_ok=True)
    name, rank = kind
    paths = [
        folder / f"{name}-{rank}-{number:02}.safetensors" for number in range(count)
    ]
    if not paths[0].exists():
        config = Flux2Transformer2DModel.load_config(model / "transformer")
        with torch.device("meta"):
            network = Flux2Transformer2DModel.from_config(config)
        generator = torch.Generator(device).manual_seed(rank)
        tensors = dict(_tensors(network, kind, generator))
        save_file({key: each.cpu() for key, each in tensors.items()}, paths[0])
    for path in paths[1:]:
        if not path.exists():
            os.link(paths[0], path)
    return paths


def _tensors(
    network: nn.Module, kind: Kind, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """In diffusers' names, of all layers in blocks."""
    name, rank = kind

    def noise(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=generator.device)
        return (made / shape[-1] ** 0.5).bfloat16()

    for path, layer in network.named_modules():
        if not isinstance(layer, nn.Linear) or "blocks" not in path:
            continue
        outer, inner = layer.weight.shape
        if name == "lora":
            yield f"transformer.{path}.lora_A.weight", noise(rank, inner)
            yield f"transformer.{path}.lora_B.weight", _STRENGTH * noise(outer, rank)
        else:
            yield f"transformer.{path}.lokr_w1", noise(4, 4)
            yield f"transformer.{path}.lokr_w2_a", _STRENGTH * noise(outer // 4, rank)
            yield f"transformer.{path}.lokr_w2_b", noise(rank, inner // 4)


def request(**changes: Any) -> contract.ImageRequest:
    fields: JSONDict = {
        "prompt": "a red house by a lake, digital art",
        "negative_prompt": "",
        "loras": (),
        "sampler": "euler",
        "steps": 4,
        "cfg_scale": 1.0,
        "seed": 1,
        "width": 1024,
        "height": 1024,
    }
    return contract.ImageRequest(**{**fields, **changes})


def lora_of(path: Path) -> contract.Lora:
    return contract.Lora(path.stem, path, 1.0, 1.0)

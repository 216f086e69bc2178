"""Tiny random ControlNets for tiny checkpoints, which steer their images visibly."""

import json
from pathlib import Path

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn

#: Of the layers' outputs. Those that are zero before training are smaller than the UNet's own; the
#: image would vanish in its ten layers without any.
_OUTPUT_GAIN, _HINT_GAIN = 0.5, 2.5

#: One less halving than there are.
_HINT_CHANNELS = (16, 32, 96, 256)


def make(checkpoint: Path, seed: int = 0) -> ControlNetModel:
    """For a checkpoint in diffusers' format; the same seed gives the same weights."""
    config, vae = (
        json.loads((checkpoint / part / "config.json").read_text())
        for part in ("unet", "vae")
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = ControlNetModel.from_unet(
            UNet2DConditionModel.from_config(config),
            conditioning_embedding_out_channels=_HINT_CHANNELS[
                : len(vae["block_out_channels"])
            ],
        )
        network.requires_grad_(requires_grad=False)
        for layer in (*network.controlnet_down_blocks, network.controlnet_mid_block):
            _randomise(layer, _OUTPUT_GAIN)
        for layer in network.controlnet_cond_embedding.modules():
            if isinstance(layer, nn.Conv2d):
                _randomise(layer, _HINT_GAIN)
    return network


def build(path: Path, checkpoint: Path, seed: int = 0) -> Path:
    """Writes one as a file in diffusers' names; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(make(checkpoint, seed).state_dict(), path)
    return path


def _randomise(layer: nn.Conv2d, gain: float) -> None:
    inputs = layer.weight[0].numel()
    layer.weight.copy_(torch.randn_like(layer.weight) * gain / inputs**0.5)

"""What a model family says of itself; the rest of the engine is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from worker.engine import text
from worker.engine.lora.layout import Network

Weights = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """One of a family's text encoders: a CLIPTextModel, or one with a projection."""

    network: Network
    """The encoder's name, which is that of its folder in diffusers' format."""
    config: Config
    """The encoder's configuration for single files without a configuration folder."""
    prefix: str
    """The prefix of the encoder's keys in single files."""
    convert: Callable[[Weights, Any], dict[str, torch.Tensor]]
    """A single file's weights, without the prefix, in transformers' names; by its configuration."""
    rules: text.Rules


@dataclass(frozen=True, slots=True)
class Family:
    """The configurations are those of single files without a configuration folder."""

    name: str
    slug: str
    """The family's name for programs."""
    unet_config: Config
    vae_config: Config
    text_encoders: tuple[TextEncoder, ...]
    has_size_ids: bool = False
    """The UNet takes the image's size and the last text encoder's pooled vector."""
    zeroes_empty_negative: bool = False
    """An empty negative prompt is zeros, as AUTOMATIC1111 has it, not the encoding of no words."""
    overflows_in_float16: bool = False
    """The VAE's activations exceed float16: they are computed at a fraction of their size."""
    has_large_layers: bool = False
    """A copy of all linear layers per slot fits large GPUs only; on others much has to be saved."""
    find_prediction: Callable[[Any], str] = field(default=lambda _: "epsilon")
    """What a UNet predicts, where nothing states it."""
    enlarges_image: bool = False
    """The UNet takes an image in the size of the latents, with noise, and that noise's level."""
    scheduler_config: Config = field(default_factory=dict)
    """The noise where the scheduler has no configuration; empty for SD's usual one."""
    native_sides: Mapping[str, int] = field(default_factory=dict)
    """Pixels, by what the UNet predicts; otherwise the UNet's configuration says."""

    @property
    def skips_layers(self) -> bool:
        """Whether a job's clip_skip means anything."""
        return any(encoder.rules.layer is None for encoder in self.text_encoders)

    @property
    def networks(self) -> tuple[Network, ...]:
        """The names of its text encoders."""
        return tuple(encoder.network for encoder in self.text_encoders)


def read_clip(weights: Weights, _config: Any) -> dict[str, torch.Tensor]:
    """CLIP's text encoder as transformers has it; some files lack a level, some have positions."""
    return {
        key.removeprefix("text_model."): weight
        for key, weight in weights.items()
        if not key.endswith("position_ids")
    }

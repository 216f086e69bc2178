"""Merges LoRAs of any kind into a model's weights, where they cost nothing per UNet call.

Every merge starts from a copy of the checkpoint's own weights: subtracting a change would leave its
rounding in the next image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.lora.file import LoraFile, WeightDelta
from worker.engine.lora.names import LayerId, Network, adaptable_layers

LoraKey = tuple[object, ...]
"""What identifies LoRAs with their strengths; () for none."""


@dataclass(frozen=True, slots=True)
class AppliedLora:
    """A LoRA and its strength on each network."""

    file: LoraFile
    weights: Mapping[Network, float]

    @property
    def key(self) -> LoraKey:
        return (self.file.identity, *sorted(self.weights.items()))


def key_of(loras: Sequence[AppliedLora]) -> LoraKey:
    """Identifies LoRAs and their strengths."""
    return tuple(lora.key for lora in loras)


def restrict(loras: Sequence[AppliedLora], network: Network) -> tuple[AppliedLora, ...]:
    """The LoRAs that change one network, with strength 0 on the other."""
    return tuple(
        AppliedLora(lora.file, {**dict.fromkeys(lora.weights, 0.0), network: weight})
        for lora in loras
        if (weight := lora.weights.get(network, 0.0)) and lora.file.deltas[network]
    )


class Merger:
    """The weights of one model; for the engine's thread only."""

    def __init__(
        self,
        unet: nn.Module,
        text_encoders: Mapping[Network, nn.Module],
        *,
        keeps_on_cpu: bool = False,
    ) -> None:
        """*keeps_on_cpu*: the device has no room for copies of the original weights."""
        self._keeps_on_cpu = keeps_on_cpu
        self._device: torch.device = next(unet.parameters()).device
        networks: dict[Network, nn.Module] = {"unet": unet, **text_encoders}
        self._layers: dict[LayerId, nn.Linear | nn.Conv2d] = {
            (network, path): layer
            for network, module in networks.items()
            for path, layer in adaptable_layers(module).items()
        }
        # Of the layers that some LoRA has changed so far: at worst, the two networks once more.
        self._originals: dict[LayerId, torch.Tensor] = {}
        self._merged: set[LayerId] = set()
        self._active: LoraKey | None = ()

    @torch.no_grad()
    def activate(self, loras: Sequence[AppliedLora]) -> None:
        """Sets the weights to the checkpoint's plus these LoRAs; bit-exact without any."""
        key = key_of(loras)
        if key == self._active:
            return
        self._active = None  # unknown until it is done: it may fail halfway
        deltas: dict[LayerId, list[tuple[float, WeightDelta]]] = {}
        for lora in loras:
            for network, by_path in lora.file.deltas.items():
                if weight := lora.weights.get(network, 0.0):
                    for path, delta in by_path.items():
                        deltas.setdefault((network, path), []).append((weight, delta))
        for layer in self._merged - deltas.keys():
            self._layers[layer].weight.copy_(self._originals[layer])
        self._merged = self._merged & deltas.keys()
        for layer, weighted in deltas.items():
            self._merge(layer, weighted)
        self._active = key

    @property
    def originals(self) -> Mapping[str, torch.Tensor]:
        """The checkpoint's own weights of the layers that are changed now, by network and path."""
        return {
            f"{network}.{path}.weight": self._originals[network, path]
            for network, path in self._merged
        }

    def reset(self) -> None:
        """Forgets all weights, after those of the checkpoint have been replaced."""
        self._originals.clear()
        self._merged.clear()
        self._active = ()

    def close(self) -> None:
        """Frees the copies of the original weights; the model can no longer be used."""
        self._originals.clear()

    def _merge(self, layer: LayerId, weighted: Sequence[tuple[float, WeightDelta]]) -> None:
        weight = self._layers[layer].weight
        if layer not in self._originals:
            copied = weight.detach().cpu() if self._keeps_on_cpu else weight
            self._originals[layer] = copied.clone()
        # Layers that are reloaded are in the host's memory; text encoders may compute there.
        device = self._device if layer[0] == "unet" else weight.device
        original = self._originals[layer].to(device, torch.float32)
        merged = original.clone()
        for strength, delta in weighted:
            merged += strength * delta.compute(original)
        self._merged.add(layer)
        weight.copy_(merged)

"""LoRAs on the model: merged into its weights for as long as a batch needs them.

Every merge starts from the checkpoint's own weights, kept beside: taking a change out again by
subtraction would leave its rounding behind, and the next image with it. Merged, a LoRA costs
nothing while an image is drawn, and all kinds of it are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.lora.file import LoraFile
from worker.engine.lora.formats import WeightDelta
from worker.engine.lora.names import Network, Place, adaptable_layers


@dataclass(frozen=True, slots=True)
class Applied:
    """A LoRA and how strongly it changes each network."""

    file: LoraFile
    weights: Mapping[Network, float]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.file.identity, *sorted(self.weights.items()))


class Merger:
    """The weights of one model; used by the GPU's thread alone."""

    def __init__(self, unet: nn.Module, text_encoder: nn.Module) -> None:
        networks: dict[Network, nn.Module] = {"unet": unet, "text_encoder": text_encoder}
        self._layers: dict[Place, nn.Linear | nn.Conv2d] = {
            (network, path): layer
            for network, module in networks.items()
            for path, layer in adaptable_layers(module).items()
        }
        # Of the layers that some LoRA has changed so far: at worst, the two networks once more.
        self._originals: dict[Place, torch.Tensor] = {}
        self._merged: set[Place] = set()
        self._active: tuple[object, ...] | None = ()

    @torch.no_grad()
    def activate(self, loras: Sequence[Applied]) -> None:
        """Makes the model the base model plus just these LoRAs; without any, exactly the base."""
        key = tuple(applied.key for applied in loras)
        if key == self._active:
            return
        self._active = None  # until all is done: after a failure, nothing counts as merged
        deltas: dict[Place, list[tuple[float, WeightDelta]]] = {}
        for applied in loras:
            for network, changes in applied.file.changes.items():
                if weight := applied.weights[network]:
                    for path, change in changes.items():
                        deltas.setdefault((network, path), []).append((weight, change))
        for place in self._merged - deltas.keys():
            self._layers[place].weight.copy_(self._originals[place])
        self._merged = self._merged & deltas.keys()
        for place, weighted in deltas.items():
            self._merge(place, weighted)
        self._active = key

    def close(self) -> None:
        """Frees the weights that were kept; the model is not to be used any more."""
        self._originals.clear()

    def _merge(self, place: Place, weighted: Sequence[tuple[float, WeightDelta]]) -> None:
        weight = self._layers[place].weight
        if place not in self._originals:
            self._originals[place] = weight.clone()
        original = self._originals[place].float()
        merged = original.clone()
        for strength, change in weighted:
            merged += strength * change.delta(original)
        self._merged.add(place)
        weight.copy_(merged)

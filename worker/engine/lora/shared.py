"""Merges LoRAs into the weights that all jobs share, a network's or for good a checkpoint's.

Every merge starts from a copy of the checkpoint's own weights: subtracting a change would leave its
rounding in the next image.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagefleet.errors import SetupError
from imagefleet.files.safetensors import identify
from worker.engine.families.table import Family
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Tensors
from worker.engine.lora.file import adaptable, read_lora
from worker.engine.lora.merge import AppliedLora, LoraKey, Weighted, key_of


class Merger:
    """The weights of one network; for the engine's thread only."""

    def __init__(self, network: nn.Module, *, keeps_on_cpu: bool = False) -> None:
        """*keeps_on_cpu*: the device has no room for copies of the original weights."""
        self._keeps_on_cpu = keeps_on_cpu
        self._device: torch.device = next(network.parameters()).device
        self._weights = adaptable(network)
        #: What merging takes, by a guess; weights in int8 cannot be merged into.
        self.expected_seconds = 1.0 if keeps_on_cpu else 0.02
        if any(each.dtype == torch.int8 for each in self._weights.values()):
            self.expected_seconds = math.inf
        # Of those that some LoRA has changed so far: at worst, the network once more.
        self._originals: dict[str, Tensor] = {}
        self._merged: set[str] = set()
        self._active: LoraKey | None = ()

    @torch.no_grad()
    def activate(self, loras: Sequence[AppliedLora]) -> None:
        """Sets the weights to the checkpoint's plus these LoRAs; bit-exact without any."""
        key = key_of(loras)
        if key == self._active:
            return
        self._active = None  # unknown until it is done: it may fail halfway
        deltas: dict[str, list[Weighted]] = {}
        for lora in loras:
            for path, delta in lora.deltas.items():
                deltas.setdefault(path, []).append((lora.weight, delta))
        for path in self._merged - deltas.keys():
            self._weights[path].copy_(self._originals[path])
        self._merged = self._merged & deltas.keys()
        for path, weighted in deltas.items():
            self._merge(path, weighted)
        self._active = key

    def _merge(self, path: str, weighted: Sequence[Weighted]) -> None:
        weight = self._weights[path]
        if path not in self._originals:
            copied = weight.detach().cpu() if self._keeps_on_cpu else weight
            self._originals[path] = copied.clone()
        # Computed on the device, though layers that are reloaded are in the host's memory.
        original = self._originals[path].to(self._device, torch.float32)
        merged = original.clone()
        for strength, delta in weighted:
            merged += strength * delta.compute(original)
        self._merged.add(path)
        weight.copy_(merged)

    @property
    def originals(self) -> Tensors:
        """The checkpoint's own weights of the layers that are changed now, by path."""
        return {path: self._originals[path] for path in self._merged}

    def reset(self) -> None:
        """Forgets all weights, once those of the checkpoint are replaced or no longer used."""
        self._originals.clear()
        self._merged.clear()
        self._active = ()


@torch.no_grad()
def merge_for_good(path: Path, family: Family, networks: Mapping[str, Any]) -> None:
    """Merges a LoRA into a checkpoint just read, not summed yet; raises as `safetensors.named`."""
    with safetensors.named(f"the accelerator {path.name!r}"):
        found = read_lora(path, identify(path), family.lora_layers(networks))
    if not found.deltas.get(family.backbone):
        raise SetupError(f"the accelerator {path.name!r} changes nothing of the UNet")
    for network, deltas in found.deltas.items():
        changed = adaptable(networks[network]) if deltas else {}
        for name, delta in deltas.items():
            weight = changed[name]
            original = weight.float()
            # Not in place: what is read of a file may be the file's own memory.
            weight.data = (original + delta.compute(original)).to(weight.dtype)

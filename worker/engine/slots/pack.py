"""LoRAs as data: a job's weight changes in one network, packed into one tensor for one copy.

Only low-rank changes of layers that slots can hold; others (LoHa, LoKr, DoRA, convolutions, too
high a rank) are merged into the shared weights (`lora/merge.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.lora.formats import WeightDelta
from worker.engine.lora.merge import AppliedLora
from worker.engine.lora.names import Network, adaptable_layers
from worker.engine.slots.linear import Factors, Group

#: Matrix products run at full speed only on operands that are multiples of 16 bytes.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PackedLoras:
    """The low-rank changes of one network in one flat tensor, page-locked for copies to a GPU."""

    flat: torch.Tensor
    shapes: Mapping[Group, tuple[int, int, int, int]]
    """Layers, out, rank and in of each changed group; a group's ups come before its downs."""
    positions: Mapping[str, tuple[Group, int]]
    """The group of each changed layer, and its index there; other layers' factors are zero."""

    def by_group(self, flat: torch.Tensor) -> dict[Group, Factors]:
        """Views [layers, out, rank] and [layers, rank, in] of *flat*, a copy on any device."""
        factors, at = {}, 0
        for group, (layers, outer, rank, inner) in self.shapes.items():
            middle, end = at + layers * outer * rank, at + layers * rank * (outer + inner)
            up, down = flat[at:middle], flat[middle:end]
            factors[group] = (up.view(layers, outer, rank), down.view(layers, rank, inner))
            at = end
        return factors

    def by_layer(self, flat: torch.Tensor) -> dict[str, Factors]:
        """The same for each changed layer, by path."""
        groups = self.by_group(flat)
        return {
            path: (groups[group][0][at], groups[group][1][at])
            for path, (group, at) in self.positions.items()
        }


def pack(
    loras: Sequence[AppliedLora],
    network: Network,
    groups: Mapping[Group, Sequence[str]],
    *,
    rank_capacity: int,
    dtype: torch.dtype,
    pinned: bool,
) -> PackedLoras | None:
    """The changes of *loras* at their strengths; None if they are not of low rank.

    *groups* are the paths of the layers that slots can hold.
    """
    known = {path: (group, at) for group, paths in groups.items() for at, path in enumerate(paths)}
    weighted: dict[str, list[tuple[float, WeightDelta]]] = {}
    ranks: dict[Group, int] = {}
    for lora in loras:
        for path, delta in lora.file.deltas[network].items():
            if path not in known or delta.tensors.keys() != {"down", "up"}:
                return None
            weighted.setdefault(path, []).append((lora.weights[network], delta))
    for path, deltas in weighted.items():
        rank = sum(len(delta.tensors["down"]) for _, delta in deltas)
        if rank > rank_capacity:
            return None
        group, _ = known[path]
        ranks[group] = max(ranks.get(group, 0), rank + -rank % _ALIGNMENT)
    shapes = {
        group: (len(groups[group]), outer, rank, inner)
        for group, rank in ranks.items()
        for _, outer, inner in [group]
    }
    size = sum(layers * (outer + inner) * rank for layers, outer, rank, inner in shapes.values())
    flat = torch.zeros(size, dtype=dtype, pin_memory=pinned)
    packed = PackedLoras(flat, shapes, {path: known[path] for path in weighted})
    for path, (up, down) in packed.by_layer(flat).items():
        at = 0
        for strength, delta in weighted[path]:
            part = slice(at, at + len(delta.tensors["down"]))
            source = delta.tensors["up"].flatten(1)
            # Rounded once, and not at all where the file has the wanted type.
            source = source if source.dtype == dtype else source.float()
            torch.mul(source, strength * delta.scale, out=up[:, part])
            down[part] = delta.tensors["down"].flatten(1)
            at = part.stop
    return packed


def group_by_shape(network: nn.Module) -> dict[Group, list[str]]:
    """The linear layers of a network that LoRAs can change, by shape."""
    groups: dict[Group, list[str]] = {}
    for path, layer in adaptable_layers(network).items():
        if isinstance(layer, nn.Linear):
            outer, inner = layer.weight.shape
            groups.setdefault(("linear", outer, inner), []).append(path)
    return groups


class TextEncoderLoras:
    """Merges packed LoRAs into a text encoder while some prompts are encoded."""

    def __init__(self, text_encoder: nn.Module) -> None:
        self._weights = {
            path: layer.weight
            for path, layer in adaptable_layers(text_encoder).items()
            if isinstance(layer, nn.Linear)
        }
        # Of the layers that some LoRA has changed so far: at worst, the network once more.
        self._originals: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def merged(self, factors: Mapping[str, Factors]) -> Iterator[None]:
        """Restores the weights from a copy: subtracting a change would leave its rounding."""
        changed = [self._weights[path] for path in factors]
        for path in factors.keys() - self._originals.keys():
            self._originals[path] = self._weights[path].clone()
        try:
            for path, (up, down) in factors.items():
                self._weights[path].addmm_(up, down)
            yield
        finally:
            if changed:
                torch._foreach_copy_(changed, [self._originals[path] for path in factors])

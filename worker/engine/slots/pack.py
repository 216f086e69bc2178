"""LoRAs as data: a job's changes of one network, packed into one tensor that is copied at once.

Only changes of low rank on layers that slots can have of their own; other kinds (LoHa, LoKr, DoRA,
changes of convolutions, too high a rank) are merged into the shared weights, see `lora.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.lora import merge
from worker.engine.lora.formats import WeightDelta
from worker.engine.lora.names import Network, adaptable_layers
from worker.engine.slots.linear import Factors, Group

#: Matrix products need their operands at multiples of 16 bytes to run at full speed.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """The low-rank changes of one network, in one tensor: page-locked where it goes to a GPU."""

    flat: torch.Tensor
    shapes: Mapping[Group, tuple[int, int, int, int]]
    """Of the groups that are changed: layers, out, rank, in. All ups of a group, all its downs."""
    places: Mapping[str, tuple[Group, int]]
    """By layer that is changed: its group, its place there. Other layers' factors are zero."""

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
        """The same for each layer that is changed, by path."""
        groups = self.by_group(flat)
        return {
            path: (groups[group][0][at], groups[group][1][at])
            for path, (group, at) in self.places.items()
        }


def restrict(loras: Sequence[merge.Applied], network: Network) -> tuple[merge.Applied, ...]:
    """What of some LoRAs changes one network; nothing of those that change the other alone."""
    others: dict[Network, float] = {"unet": 0.0, "text_encoder": 0.0}
    return tuple(
        merge.Applied(applied.file, {**others, network: weight})
        for applied in loras
        if (weight := applied.weights[network]) and applied.file.changes[network]
    )


def pack(
    loras: Sequence[merge.Applied],
    network: Network,
    groups: Mapping[Group, Sequence[str]],
    *,
    rank_capacity: int,
    dtype: torch.dtype,
    pinned: bool,
) -> Packed | None:
    """The changes of *loras*, their strengths included; None where they are not of low rank.

    *groups* are the paths of the layers that may be changed.
    """
    known = {path: (group, at) for group, paths in groups.items() for at, path in enumerate(paths)}
    weighted: dict[str, list[tuple[float, WeightDelta]]] = {}
    ranks: dict[Group, int] = {}
    for applied in loras:
        for path, change in applied.file.changes[network].items():
            if path not in known or change.parts.keys() != {"down", "up"}:
                return None
            weighted.setdefault(path, []).append((applied.weights[network], change))
    for path, changes in weighted.items():
        rank = sum(len(change.parts["down"]) for _, change in changes)
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
    packed = Packed(flat, shapes, {path: known[path] for path in weighted})
    for path, (up, down) in packed.by_layer(flat).items():
        at = 0
        for strength, change in weighted[path]:
            part = slice(at, at + len(change.parts["down"]))
            source = change.parts["up"].flatten(1)
            # Rounded once, and without a detour where the file has the type that is wanted.
            source = source if source.dtype == dtype else source.float()
            torch.mul(source, strength * change.scale, out=up[:, part])
            down[part] = change.parts["down"].flatten(1)
            at = part.stop
    return packed


def group_by_shape(network: nn.Module) -> dict[Group, list[str]]:
    """The linear layers of a network that LoRAs may change, by their shape."""
    groups: dict[Group, list[str]] = {}
    for path, layer in adaptable_layers(network).items():
        if isinstance(layer, nn.Linear):
            outer, inner = layer.weight.shape
            groups.setdefault(("linear", outer, inner), []).append(path)
    return groups


class TextEncoderLoras:
    """Merges packed LoRAs into a text encoder for as long as some prompts are encoded."""

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
        """Puts the weights back from a copy: taking a change out again would leave its rounding."""
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

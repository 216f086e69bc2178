"""Linear layers with shared weights and a copy per slot, and the LoRAs merged into the copies.

A slot's weights are the checkpoint's with its LoRAs merged in, so a call only has to read more
weights, whatever the LoRAs' rank. Two thin products per layer for the low-rank term would move ten
times the memory, since their inputs and outputs are as wide as the layer's.

A job's LoRAs are packed into one tensor for one copy: only low-rank changes of layers that slots
can hold; others (LoHa, LoKr, DoRA, convolutions, too high a rank) are merged into the shared
weights (`lora/merge.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from worker.engine.lora.file import WeightDelta
from worker.engine.lora.merge import AppliedLora
from worker.engine.lora.names import Network, adaptable_layers

#: A low-rank weight change: up [..., out, rank] and down [..., rank, in].
Factors = tuple[torch.Tensor, torch.Tensor]

#: Use, out and in: layers of one shape, whose weights are stacked so that one product merges them.
Group = tuple[str, int, int]

#: Matrix products run at full speed only on operands that are multiples of 16 bytes.
_ALIGNMENT = 8


class SlotLinear(nn.Module):
    """Linear or 1x1 layers of one shape and the same input, as one product.

    The layers' weights become views of this one's: merging into them merges here.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    slots: torch.Tensor

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        """*layers* by path; a `WeightStack` sets the weights."""
        super().__init__()
        self.layers = dict(layers)
        biases = [_parameter(layer, "bias") for layer in layers.values() if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("slots", None, persistent=False)

    def forward(self, x: torch.Tensor, per_slot: bool) -> torch.Tensor:
        """[slots, tokens of both rows, in] to [..., out], with shared or per-slot weights."""
        if not per_slot and not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        if per_slot:
            product = torch.bmm(x, self.slots[: len(x)].transpose(1, 2))
        else:
            product = F.linear(x, self.weight)
        # Compiled, the bias is fused into what follows; products without one are faster.
        return product if self.bias is None else product + self.bias


class WeightStack:
    """The weights of a group's layers: the shared ones, and each slot's."""

    def __init__(self, linears: Sequence[SlotLinear]) -> None:
        self.paths = [path for linear in linears for path in linear.layers]
        layers = [layer for linear in linears for layer in linear.layers.values()]
        originals = [_parameter(layer, "weight") for layer in layers]
        self.shared = torch.stack([weight.flatten(1) for weight in originals])
        """[layers, out, in]"""
        self._linears = linears
        for layer, weight, original in zip(layers, self.shared, originals, strict=True):
            layer.weight = nn.Parameter(weight.view(original.shape), requires_grad=False)
        for linear, part in self._parts():
            linear.weight = self.shared[part].flatten(0, 1)
        self.resize(0)

    def resize(self, slots: int) -> None:
        """Allocates zero weights for *slots* slots, in one block."""
        self._slots = slots
        self._blocks: list[torch.Tensor] = []
        self.use_block(0)

    def use_block(self, block: int) -> None:
        """Uses another block of slots' weights, allocated at its first use."""
        while len(self._blocks) <= block:
            self._blocks.append(self.shared.new_zeros((self._slots, *self.shared.shape)))
        self._own = self._blocks[block]
        for linear, part in self._parts():
            linear.slots = self._own[:, part].flatten(1, 2)

    def load(self, slot: int, factors: Factors | None) -> None:
        """Sets a slot to the shared weights, plus a change of all layers."""
        if factors is None:
            self._own[slot].copy_(self.shared)
        else:
            torch.baddbmm(self.shared, *factors, out=self._own[slot])

    def _parts(self) -> Iterable[tuple[SlotLinear, slice]]:
        at = 0
        for linear in self._linears:
            yield linear, slice(at, at + len(linear.layers))
            at += len(linear.layers)


def stack_by_shape(use: str, linears: Iterable[SlotLinear]) -> dict[Group, WeightStack]:
    """Groups *linears* by the shape of their layers."""
    by_shape: dict[Group, list[SlotLinear]] = {}
    for linear in linears:
        shapes = {_parameter(layer, "weight").flatten(1).shape for layer in linear.layers.values()}
        ((outer, inner),) = shapes
        by_shape.setdefault((use, outer, inner), []).append(linear)
    return {group: WeightStack(members) for group, members in by_shape.items()}


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    value = getattr(layer, name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a layer has no {name}")
    return value.detach()


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

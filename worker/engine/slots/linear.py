"""Linear layers with shared weights and a copy per slot, and the LoRAs merged into the copies.

A slot's weights are the checkpoint's with its LoRAs merged in, so a call only has to read more
weights, whatever the LoRAs' rank. Two thin products per layer for the low-rank term would move ten
times the memory, since their inputs and outputs are as wide as the layer's.

Changes of any kind are merged, those of all layers of one shape at once (`lora/stacked.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from worker.engine.lora.names import adaptable_layers
from worker.engine.lora.pack import Group
from worker.engine.lora.stacked import StackedChange


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
        self.shared = _stack_weights(layers)
        self._linears = linears
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

    def load(self, slot: int, change: StackedChange | None, temporary_bytes: int) -> None:
        """Sets a slot to the shared weights, plus a job's change."""
        if change is None:
            self._own[slot].copy_(self.shared)
        else:
            change.merge(self.shared, self._own[slot], temporary_bytes)

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


def _stack_weights(layers: Sequence[nn.Module]) -> torch.Tensor:
    """The layers' weights [layers, out, in], of which their own become views."""
    originals = [_parameter(layer, "weight") for layer in layers]
    stacked = torch.stack([weight.flatten(1) for weight in originals])
    for layer, weight, original in zip(layers, stacked, originals, strict=True):
        layer.weight = nn.Parameter(weight.view(original.shape), requires_grad=False)
    return stacked


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    value = getattr(layer, name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a layer has no {name}")
    return value.detach()


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
        layers = adaptable_layers(text_encoder)
        self._weights = {
            group: _stack_weights([layers[path] for path in paths])
            for group, paths in group_by_shape(text_encoder).items()
        }
        # Of the groups that some LoRA has changed so far: at worst, the network once more.
        self._originals: dict[Group, torch.Tensor] = {}

    @contextlib.contextmanager
    def merged(self, changes: Mapping[Group, StackedChange]) -> Iterator[None]:
        """Restores the weights from a copy: subtracting a change would leave its rounding."""
        for group in changes.keys() - self._originals.keys():
            self._originals[group] = self._weights[group].clone()
        try:
            for group, change in changes.items():
                change.merge(self._originals[group], self._weights[group])
            yield
        finally:
            for group in changes:
                self._weights[group].copy_(self._originals[group])

    def close(self) -> None:
        """Frees all weights."""
        self._weights.clear()
        self._originals.clear()

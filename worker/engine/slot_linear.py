"""A linear layer of which each slot can have weights of its own.

A slot's weights are the checkpoint's with its LoRAs merged in, so what a LoRA costs in a call is
that its slot's weights are read; its rank costs nothing. Against two thin products a layer for the
low-rank term, whose inputs and outputs are as wide as the layer's, it moves a tenth of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

#: A change of a layer's weight, as low-rank factors: up [out, rank], down [rank, in].
Factors = tuple[torch.Tensor, torch.Tensor]


class SlotLinear(nn.Module):
    """Linear or 1x1 layers of one input, as one product.

    The layers keep their weights, as parts of this one's: what is merged into them is merged here.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    slots: torch.Tensor

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        weights = [_parameter(layer, "weight") for layer in layers.values()]
        biases = [_parameter(layer, "bias") for layer in layers.values() if layer.bias is not None]
        packed = torch.cat([weight.flatten(1) for weight in weights])
        self.register_buffer("weight", packed, persistent=False)
        self.register_buffer("bias", _pack_biases(biases), persistent=False)
        self.register_buffer("slots", packed.new_empty((0, *packed.shape)), persistent=False)
        self.parts: dict[str, slice] = {}
        at = 0
        for (path, layer), weight in zip(layers.items(), weights, strict=True):
            self.parts[path] = slice(at, at + len(weight))
            layer.weight = nn.Parameter(
                packed[at : at + len(weight)].view(weight.shape), requires_grad=False
            )
            at += len(weight)

    def forward(self, x: torch.Tensor, by_slot: bool) -> torch.Tensor:
        """From x [2 * slots, tokens, in]: a slot's two rows lie side by side and share weights."""
        if not by_slot:
            return F.linear(x, self.weight, self.bias)
        rows, tokens, width = x.shape
        own = self.slots[: rows // 2]
        product = torch.bmm(x.reshape(rows // 2, 2 * tokens, width), own.transpose(1, 2))
        product = product.view(rows, tokens, -1)
        return product if self.bias is None else product + self.bias

    def resize(self, slots: int) -> None:
        """Makes room for the weights of *slots* slots; what they had is gone."""
        self.slots = self.weight.new_zeros((slots, *self.weight.shape))

    def change(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Adds the changes of a slot's LoRAs to its weights, which are the checkpoint's own."""
        for path, rows in self.parts.items():
            if path in factors:
                self.slots[slot, rows].addmm_(*factors[path])


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    value = getattr(layer, name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a layer has no {name}")
    return value.detach()


def _pack_biases(biases: list[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat(biases) if biases else None

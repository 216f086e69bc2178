"""Linear layers with shared weights and a copy per slot, and the LoRAs merged into the copies.

So a call only has to read more weights, whatever the LoRAs' kind and rank. Two thin products per
layer for a low-rank term would move ten times the memory, their inputs and outputs being as wide as
the layer's. Where memory is too short for copies (SDXL's take 3.7 GB per slot), LoRAs are merged
into the layers themselves, for one slot, which are loaded again from the host's memory for others.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Module

from imagefleet.errors import SetupError
from worker.engine.files import safetensors
from worker.engine.lora.file import Layer, adaptable, adaptable_layers
from worker.engine.lora.merge import Group, Groups, StackedChange

#: The most bytes of one tensor with weights for all slots. Of SDXL's shapes the largest would take
#: 25 GB; see "SDXL" in benchmarks/engine-notes.md.
_MAX_PART_BYTES = 2**31

#: Those of a lane whose images have one row. Weights are divided as for so many, however many there
#: are: the places of layers in a part are compiled in, and how many slots fit is not the same on
#: each node.
_MOST_SLOTS = 32


#: A job's changes of layers, by their group.
GroupChanges = Mapping[Group, StackedChange]


class SlotLinear(Module):
    """Linear or 1x1 layers of one shape and the same input, as one product.

    The layers' weights become views of this one's: merging into them merges here.
    """

    weight: Tensor
    bias: Tensor | None
    slots: Tensor

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        """*layers* by path; a stack sets the weights, or `share`."""
        super().__init__()
        self.layers = dict(layers)
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", join_biases(layers.values()), persistent=False)
        self.register_buffer("slots", None, persistent=False)

    def forward(self, x: Tensor, per_slot: bool) -> Tensor:
        """[slots, tokens of both rows, in] to [..., out], with shared or per-slot weights."""
        if not per_slot and not torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        if per_slot:
            product = torch.bmm(x, self.slots[: len(x)].transpose(1, 2))
        else:
            product = F.linear(x, self.weight)
        # Compiled, the bias is fused into what follows; products without one are faster.
        if self.bias is None:
            return product
        return product + self.bias

    def share(self) -> None:
        """Makes the layers' own weights the only ones, for networks that LoRAs do not change."""
        self.weight = _stack_weights(
            each.weight for each in self.layers.values()
        ).flatten(0, 1)


#: Linears and the places of their layers in a stack: their weights for all slots are one tensor.
_Part = list[tuple[SlotLinear, slice]]


class WeightStack:
    """The weights of a group's layers: the shared ones, and each slot's."""

    def __init__(self, linears: Sequence[SlotLinear]) -> None:
        self.paths = [path for linear in linears for path in linear.layers]
        self.shared = _stack_weights(each.weight for each in _layers_of(linears))
        self._linears = list(_places(linears))
        for linear, places in self._linears:
            linear.weight = self.shared[places].flatten(0, 1)
        self.resize(0)

    def resize(self, *slots: int) -> None:
        """Allocates zero weights for the *slots* of the first block; others have the last ones'."""
        self._slots = slots
        self._parts = self._divide()
        self._blocks: dict[int, list[Tensor]] = {}
        self.use_block(0)

    def use_block(self, block: int, slots: int | None = None) -> None:
        """Uses the first *slots* of another block's weights, allocated at its first use."""
        if block not in self._blocks:
            held = self._slots[min(block, len(self._slots) - 1)]
            self._blocks[block] = [
                self.shared.new_zeros((held, *self.shared[_whole(part)].shape))
                for part in self._parts
            ]
        self._own = self._blocks[block]
        for part, own in zip(self._parts, self._own, strict=True):
            first = _whole(part).start
            for linear, places in part:
                linear.slots = own[
                    :slots, places.start - first : places.stop - first
                ].flatten(1, 2)

    def load(
        self, slot: int, change: StackedChange | None, temporary_bytes: int
    ) -> None:
        """Sets a slot to the shared weights, plus a job's change."""
        for part, own in zip(self._parts, self._own, strict=True):
            layers = _whole(part)
            if change is None:
                own[slot].copy_(self.shared[layers])
            else:
                change.merge(
                    self.shared[layers], own[slot], temporary_bytes, first=layers.start
                )

    def _divide(self) -> list[_Part]:
        """The parts, none larger than need be for one of the linears."""
        layer_bytes = _MOST_SLOTS * self.shared[0].nbytes
        divided: list[_Part] = []
        for linear, places in self._linears:
            first = divided[-1][0][1].start if divided else 0
            if not divided or (places.stop - first) * layer_bytes > _MAX_PART_BYTES:
                divided.append([])
            divided[-1].append((linear, places))
        return divided


class ReloadedStack:
    """The weights of a group's layers for one slot, loaded again from the host's memory.

    The checkpoint's own are in page-locked memory of the host, and their layers with them.
    """

    def __init__(self, linears: Sequence[SlotLinear]) -> None:
        self.paths = [path for linear in linears for path in linear.layers]
        layers = _layers_of(linears)
        device = layers[0].weight.device
        self.shared = _stack_weights(
            (each.weight for each in layers), in_host_memory=True
        )
        self._own = self.shared.to(device, copy=True)
        for linear, places in _places(linears):
            linear.weight = self._own[places].flatten(0, 1)
            linear.slots = linear.weight[None]

    @property
    def own(self) -> safetensors.Tensors:
        """The slot's weights [out, in], by path."""
        return dict(zip(self.paths, self._own, strict=True))

    def resize(self, *slots: int) -> None:
        """There is one slot, whose weights are in use without LoRAs as well."""
        if max(slots) > 1:
            raise ValueError(f"{max(slots)} slots, and weights of one alone")

    def use_block(self, block: int, slots: int | None = None) -> None:
        """Does nothing: all lanes use the same weights."""

    def load(
        self, _slot: int, change: StackedChange | None, temporary_bytes: int
    ) -> None:
        """Sets the slot to the checkpoint's weights, plus a job's change."""
        self._own.copy_(self.shared, non_blocking=True)
        if change is not None:
            change.merge(self._own, self._own, temporary_bytes)


Stack = TypeVar("Stack", WeightStack, ReloadedStack)


def stack_by_shape(
    kind: type[Stack], use: str, linears: Iterable[SlotLinear]
) -> dict[Group, Stack]:
    by_shape: dict[Group, list[SlotLinear]] = {}
    for linear in linears:
        ((outer, inner),) = {
            layer.weight.flatten(1).shape for layer in linear.layers.values()
        }
        by_shape.setdefault((use, outer, inner), []).append(linear)
    return {group: kind(members) for group, members in by_shape.items()}


def _layers_of(linears: Sequence[SlotLinear]) -> list[Layer]:
    return [layer for linear in linears for layer in linear.layers.values()]


def _places(linears: Sequence[SlotLinear]) -> Iterator[tuple[SlotLinear, slice]]:
    """Each of *linears* with the places of its layers among those of all."""
    at = 0
    for linear in linears:
        yield linear, slice(at, at + len(linear.layers))
        at += len(linear.layers)


def _whole(part: _Part) -> slice:
    return slice(part[0][1].start, part[-1][1].stop)


def _stack_weights(
    weights: Iterable[Tensor], *, in_host_memory: bool = False
) -> Tensor:
    """Weights of one shape [layers, out, in], of which their layers' own become views."""
    alike = list(weights)
    flat = [each.detach().view(len(each), -1) for each in alike]
    if in_host_memory:
        size = sum(weight.nbytes for weight in flat)
        stacked = (
            safetensors.layers.take(size)
            .view(flat[0].dtype)
            .view(len(flat), *flat[0].shape)
        )
        for place, weight in zip(stacked, flat, strict=True):
            place.copy_(weight)
    else:
        stacked = torch.stack(flat)
    for layer_weight, weight in zip(alike, stacked, strict=True):
        layer_weight.data = weight.view(layer_weight.shape)
    return stacked


def join_biases(layers: Iterable[Layer]) -> Tensor | None:
    """The layers' biases one after the other, of which their own become views; None without any."""
    alike = list(layers)
    biases = [layer.bias for layer in alike if layer.bias is not None]
    if not biases:
        return None
    if len(biases) < len(alike):
        raise SetupError(
            "of layers with the same input some have a bias and some have not"
        )
    joined = torch.cat(biases).detach()
    for bias, part in zip(
        biases, torch.split(joined, [*map(len, biases)]), strict=True
    ):
        bias.data = part
    return joined


def group_by_shape(network: Module) -> Groups:
    """Paths of a network's weights that LoRAs can change, by shape; vectors count as [out, 1]."""
    groups: dict[Group, list[str]] = {}
    for path, parameter in adaptable(network).items():
        outer, inner = (*parameter.shape, 1)[:2]
        groups.setdefault(("linear", outer, inner), []).append(path)
    return groups


def transformer_bytes(unet: Module) -> int:
    """Size of the layers that slots have copies of: those of transformers but for the prompts'."""
    return sum(
        layer.weight.nbytes
        for path, layer in adaptable_layers(unet).items()
        if "attentions" in path and not path.endswith(("attn2.to_k", "attn2.to_v"))
    )


class TextEncoderLoras:
    """Merges packed LoRAs into a text encoder while some prompts are encoded."""

    def __init__(self, text_encoder: Module) -> None:
        self.device = next(text_encoder.parameters()).device
        weights = adaptable(text_encoder)
        self._weights = {
            group: _stack_weights(weights[path] for path in paths)
            for group, paths in group_by_shape(text_encoder).items()
        }
        # Of the groups that some LoRA has changed so far: at worst, the network once more.
        self._originals: dict[Group, Tensor] = {}

    @contextlib.contextmanager
    def merged(self, changes: GroupChanges) -> Iterator[None]:
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

    def forget(self) -> None:
        """Forgets the original weights, after those of the checkpoint have been replaced."""
        self._originals.clear()

    def close(self) -> None:
        self._weights.clear()
        self._originals.clear()

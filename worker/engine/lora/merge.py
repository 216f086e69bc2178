"""Merges LoRAs of any kind into a model's weights, where they cost nothing per UNet call.

Every merge starts from a copy of the checkpoint's own weights: subtracting a change would leave its
rounding in the next image. A job's LoRAs, of any kind and rank, are packed in one tensor for one
copy to the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from imagefleet import errors
from imagefleet.files.safetensors import Identity, identify
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Place
from worker.engine.lora import kinds
from worker.engine.lora.file import Layers, Network, WeightDelta, adaptable_layers, read_lora
from worker.engine.lora.kinds import Factors, Stack, StackedChange

LoraKey = tuple[object, ...]
"""What identifies LoRAs with their strengths; () for none."""


@dataclass(frozen=True, slots=True)
class AppliedLora:
    """What a LoRA changes in one network, and its strength there."""

    identity: Identity
    deltas: Mapping[str, WeightDelta]
    """By the layers' paths."""
    weight: float


def key_of(loras: Iterable[AppliedLora]) -> LoraKey:
    """Identifies LoRAs and their strengths."""
    return tuple((lora.identity, lora.weight) for lora in loras)


class Merger:
    """The weights of one network; for the engine's thread only."""

    def __init__(self, network: nn.Module, *, keeps_on_cpu: bool = False) -> None:
        """*keeps_on_cpu*: the device has no room for copies of the original weights."""
        self._keeps_on_cpu = keeps_on_cpu
        self._device: torch.device = next(network.parameters()).device
        self._layers = adaptable_layers(network)
        # Of the layers that some LoRA has changed so far: at worst, the network once more.
        self._originals: dict[str, torch.Tensor] = {}
        self._merged: set[str] = set()
        self._active: LoraKey | None = ()

    @torch.no_grad()
    def activate(self, loras: Sequence[AppliedLora]) -> None:
        """Sets the weights to the checkpoint's plus these LoRAs; bit-exact without any."""
        key = key_of(loras)
        if key == self._active:
            return
        self._active = None  # unknown until it is done: it may fail halfway
        deltas: dict[str, list[_Weighted]] = {}
        for lora in loras:
            for path, delta in lora.deltas.items():
                deltas.setdefault(path, []).append((lora.weight, delta))
        for path in self._merged - deltas.keys():
            self._layers[path].weight.copy_(self._originals[path])
        self._merged = self._merged & deltas.keys()
        for path, weighted in deltas.items():
            self._merge(path, weighted)
        self._active = key

    @property
    def originals(self) -> Mapping[str, torch.Tensor]:
        """The checkpoint's own weights of the layers that are changed now, by path."""
        return {path: self._originals[path] for path in self._merged}

    def reset(self) -> None:
        """Forgets all weights, after those of the checkpoint have been replaced."""
        self._originals.clear()
        self._merged.clear()
        self._active = ()

    def close(self) -> None:
        """Frees the copies of the original weights; the model can no longer be used."""
        self._originals.clear()

    def _merge(self, path: str, weighted: Sequence[_Weighted]) -> None:
        weight = self._layers[path].weight
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


@torch.no_grad()
def merge_for_good(path: Path, networks: Mapping[str, Any]) -> None:
    """Merges a LoRA into a checkpoint that was just read, before its weights are summed.

    Raises SetupError if it is not one, or not for this model.
    """
    encoders = {name: each for name, each in networks.items() if name not in {"unet", "vae"}}
    layers = Layers(networks["unet"], cast("Mapping[Network, nn.Module]", encoders))
    try:
        with safetensors.named(f"the accelerator {path.name!r}"):
            found = read_lora(path, identify(path), layers)
    except (errors.UnusableFileError, errors.TransientError) as error:
        raise errors.SetupError(error.message) from error
    if not found.deltas.get("unet"):
        raise errors.SetupError(f"the accelerator {path.name!r} changes nothing of the UNet")
    for network, deltas in found.deltas.items():
        changed = adaptable_layers(networks[network]) if deltas else {}
        for name, delta in deltas.items():
            layer = changed[name]
            original = layer.weight.float()
            # Not in place: what is read of a file may be the file's own memory.
            merged = (original + delta.compute(original)).to(layer.weight.dtype)
            layer.weight = nn.Parameter(merged, requires_grad=False)


#: Use, out and in: layers of one shape, whose weights are stacked and merged at once.
Group = tuple[str, int, int]

#: The highest rank, that of one job's LoRAs added up, of a 3x3 convolution (where 128 should cost a
#: seventh of a tick, and takes 160 MB per slot) and of other layers.
_MAX_RANK_3X3, _MAX_RANK = 128, 512


class Shape(NamedTuple):
    """A shape of weights beside which slots hold changes of low rank: 9 taps are a 3x3 kernel."""

    outputs: int
    inputs: int
    taps: int
    of_transformers: bool = False
    """A linear layer of which slots have no copy, for want of memory."""

    @property
    def max_rank(self) -> int:
        return _MAX_RANK if self.taps == 1 else _MAX_RANK_3X3

    @property
    def numbers_per_rank(self) -> int:
        return self.outputs + self.inputs * self.taps


#: The paths of the layers whose LoRAs are packed, by `Group` or, for those beside weights, `Shape`.
Groups = Mapping[Any, Sequence[str]]

#: Matrix products run at full speed only on operands that are multiples of 16 bytes.
_RANK_ALIGNMENT = 8

#: Tensors begin at multiples of this in the packed bytes.
_ALIGNMENT_BYTES = 16

#: A change of one layer and its LoRA's strength; the same of low rank, up [out, rank] and down.
_Weighted = tuple[float, WeightDelta]
WeightedFactors = tuple[float, Factors]


class Room:
    """Where tensors go in one tensor of bytes."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def place(self, dtype: torch.dtype, *shape: int) -> Place:
        begin, end = self.size_bytes, self.size_bytes + math.prod(shape) * dtype.itemsize
        self.size_bytes = end + -end % _ALIGNMENT_BYTES
        return Place(dtype, shape, begin, end)

    def place_low_rank(
        self,
        dtype: torch.dtype,
        layers: int,
        by_layer: Mapping[int, Sequence[WeightedFactors]],
        strength: float = 1.0,
    ) -> LowRank:
        """Changes of some of the *layers*, by their numbers."""
        ((_, (up, down)), *_) = next(iter(by_layer.values()))
        rank = max(map(_rank, by_layer.values()))
        rank += -rank % _RANK_ALIGNMENT
        ups = self.place(dtype, layers, len(up), rank)
        return LowRank(ups, self.place(dtype, layers, rank, len(down[0])), strength, by_layer)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank changes of layers of one shape."""

    up: Place
    down: Place
    strength: float
    """What the products of the factors are multiplied by."""
    by_layer: Mapping[int, Sequence[WeightedFactors]]

    def of(self, flat: torch.Tensor) -> Factors:
        """Views of up [layers, out, rank] and down [layers, rank, inputs]."""
        return self.up.of(flat), self.down.of(flat)

    def fill(self, flat: torch.Tensor) -> None:
        """Sets the factors; zero where nothing changes."""
        up, down = self.of(flat)
        layers, _, rank = up.shape
        if len(self.by_layer) < layers or any(
            _rank(each) < rank for each in self.by_layer.values()
        ):
            up.zero_()
            down.zero_()
        parts: dict[tuple[int, int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for layer, changes in self.by_layer.items():
            begin = 0
            for strength, (outer, inner) in changes:
                end = begin + len(inner)
                if (begin, end) not in parts:
                    parts[begin, end] = (up[:, :, begin:end].unbind(), down[:, begin:end].unbind())
                ups, downs = parts[begin, end]
                # A small strength would take float16 to its smallest numbers: half of it goes to
                # each factor, to one of them as a power of two, which is exact.
                _, exponent = math.frexp(strength / self.strength)
                half = 2.0 ** (exponent // 2)
                for target, source, factor in (
                    (ups[layer], outer, strength / self.strength / half),
                    (downs[layer], inner, half),
                ):
                    if factor == 1:
                        targets.append(target)
                        sources.append(source)
                    else:
                        # Rounded once.
                        exact = source if source.dtype == target.dtype else source.float()
                        torch.mul(exact, factor, out=target)
                begin = end
        if targets:  # one call for each would take longer than most copies
            torch._foreach_copy_(targets, sources)


@dataclass(frozen=True, slots=True)
class _StackPlaces:
    """Changes of one other kind, see `Stack`."""

    by_layer: Mapping[int, _Weighted]
    index: Place
    tensors: Mapping[str, Place]

    def of(self, flat: torch.Tensor) -> Stack:
        tensors = {name: place.of(flat) for name, place in self.tensors.items()}
        strength, delta = next(iter(self.by_layer.values()))
        return Stack(list(self.by_layer), self.index.of(flat), tensors, delta.scale, strength)


class LoraChanges(NamedTuple):
    """What a job's LoRAs change in one network, as views of one tensor on the device."""

    stacked: Mapping[Group, StackedChange]
    beside: Mapping[Shape, Factors]
    """Up [layers, out, rank] and down [layers, rank, in * taps]."""


NO_CHANGES = LoraChanges(MappingProxyType({}), MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class PackedLoras:
    """What LoRAs change in one network, and its place in one tensor of bytes.

    The numbers stay in the files' tensors until the tensor is assembled: up to four jobs a slot are
    held, which would be gigabytes.
    """

    size_bytes: int
    _low_rank: Mapping[Group, LowRank]
    _stacks: Mapping[Group, Sequence[_StackPlaces]]
    _beside: Mapping[Shape, LowRank]

    @property
    def ranks(self) -> dict[Shape, int]:
        """The ranks of the changes that slots hold beside the weights."""
        return {shape: change.up.shape[2] for shape, change in self._beside.items()}

    def assemble(self) -> torch.Tensor:
        """The tensor [size_bytes] in host memory."""
        flat = safetensors.packs.take(self.size_bytes)
        for plain in (*self._low_rank.values(), *self._beside.values()):
            plain.fill(flat)
        for places in itertools.chain.from_iterable(self._stacks.values()):
            stack = places.of(flat)
            stack.index.copy_(torch.tensor(stack.positions))
            for name, tensor in stack.tensors.items():
                shape = tensor.shape[1:]
                sources = [each.tensors[name].view(shape) for _, each in places.by_layer.values()]
                torch._foreach_copy_(tensor.unbind(), sources)
        return flat

    def of(self, flat: torch.Tensor) -> LoraChanges:
        """Views of *flat*, a copy on any device."""
        stacked = {}
        for group in {**self._low_rank, **self._stacks}:
            plain = self._low_rank.get(group)
            stacked[group] = StackedChange(
                plain.of(flat) if plain else None,
                plain.strength if plain else 1.0,
                [each.of(flat) for each in self._stacks.get(group, ())],
            )
        return LoraChanges(stacked, {shape: each.of(flat) for shape, each in self._beside.items()})


def pack(
    loras: Sequence[AppliedLora],
    groups: Groups,
    *,
    dtype: torch.dtype,
) -> PackedLoras | None:
    """The changes of *loras* at their strengths; None if no slot can hold one of them.

    Plain LoRAs are packed as *dtype*, and so is all that is of low rank beside a `Shape`'s weights;
    other kinds of a `Group`'s as they are in the file.
    """
    known = {path: (group, at) for group, paths in groups.items() for at, path in enumerate(paths)}
    plain: dict[Group, dict[int, list[WeightedFactors]]] = {}
    others: dict[Group, dict[int, list[_Weighted]]] = {}
    factored: dict[Shape, dict[int, list[WeightedFactors]]] = {}
    for lora in loras:
        for path, delta in lora.deltas.items():
            strength, tensors = lora.weight * delta.scale, delta.tensors
            if path not in known:
                return None
            group, at = known[path]
            if isinstance(group, Shape):
                if (factors := kinds.factorise(tensors, group.max_rank)) is None:
                    return None
                factored.setdefault(group, {}).setdefault(at, []).append((strength, factors))
            elif tensors.keys() == {"down", "up"}:
                factors = tensors["up"].flatten(1), tensors["down"].flatten(1)
                plain.setdefault(group, {}).setdefault(at, []).append((strength, factors))
            else:
                others.setdefault(group, {}).setdefault(at, []).append((lora.weight, delta))
    room, low_rank = Room(), {}
    for group, changes in plain.items():
        # The device multiplies by the largest, so that most jobs' factors are copied as they are.
        strengths = [strength for each in changes.values() for strength, _ in each]
        largest = max(strengths, key=abs) or 1.0
        low_rank[group] = room.place_low_rank(dtype, len(groups[group]), changes, largest)
    stacks = {
        group: [
            _StackPlaces(
                stacked,
                room.place(torch.int64, len(stacked)),
                {
                    name: room.place(tensor.dtype, len(stacked), *_as_linear(tensor.shape))
                    for name, tensor in next(iter(stacked.values()))[1].tensors.items()
                },
            )
            for stacked in _alike(by_layer)
        ]
        for group, by_layer in others.items()
    }
    held_beside = {
        shape: room.place_low_rank(dtype, len(groups[shape]), by_layer)
        for shape, by_layer in factored.items()
    }
    packed = PackedLoras(room.size_bytes, low_rank, stacks, held_beside)
    return packed if all(rank <= shape.max_rank for shape, rank in packed.ranks.items()) else None


def _alike(by_layer: Mapping[int, Sequence[_Weighted]]) -> Collection[Mapping[int, _Weighted]]:
    """What has equal names, shapes, scales and strengths, once for each layer, in their order."""
    alike: dict[object, dict[int, _Weighted]] = {}
    for at, changes in sorted(by_layer.items()):
        for strength, delta in changes:
            tensors = [
                (name, tensor.dtype, _as_linear(tensor.shape))
                for name, tensor in sorted(delta.tensors.items())
            ]
            number = 0
            while at in alike.get(key := (number, strength, delta.scale, *tensors), {}):
                number += 1
            alike.setdefault(key, {})[at] = (strength, delta)
    return alike.values()


def _as_linear(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without a 1x1 kernel: such convolutions are stacked with linear layers."""
    kernel = 2
    return tuple(shape[:kernel]) if math.prod(shape[kernel:]) == 1 else tuple(shape)


def _rank(weighted: Iterable[WeightedFactors]) -> int:
    return sum(len(down) for _, (_, down) in weighted)

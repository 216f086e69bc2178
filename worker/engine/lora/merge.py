"""Packs a job's LoRAs of any kind and rank in one tensor, for one copy to the device, and merges.

Merged into a slot's weights they cost nothing per UNet call.
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imagefleet.files.safetensors import Identity
from imagefleet.telemetry.logs import log
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Place, Tensors
from worker.engine.kernels.layers import builds_programs, runs_programs
from worker.engine.lora import kinds
from worker.engine.lora.file import WeightDelta
from worker.engine.lora.kinds import Factors

#: Identity of a set of LoRAs with their strengths; () for none.
LoraKey = tuple[object, ...]


@dataclass(frozen=True)
class AppliedLora:
    """A LoRA's deltas for one network, and its strength there."""

    identity: Identity
    #: Deltas by layer path.
    deltas: Mapping[str, WeightDelta]
    weight: float


def key_of(loras: Iterable[AppliedLora]) -> LoraKey:
    return tuple((lora.identity, lora.weight) for lora in loras)


#: Use, out and in: layers of one shape, whose weights are stacked and merged at once.
Group = tuple[str, int, int]

#: The highest rank, that of one job's LoRAs added up, of a 3x3 convolution (where 128 should cost a
#: seventh of a tick, and takes 160 MB per slot) and of other layers.
_MAX_RANK_3X3 = 128
_MAX_RANK = 512


class Shape(NamedTuple):
    """A shape of weights beside which slots hold changes of low rank: 9 taps are a 3x3 kernel."""

    outputs: int
    inputs: int
    taps: int

    @property
    def max_rank(self) -> int:
        if self.taps == 1:
            return _MAX_RANK
        return _MAX_RANK_3X3


#: The paths of the layers whose LoRAs are packed, by `Group` or, for those beside weights, `Shape`.
Groups = Mapping[Any, Sequence[str]]

#: Matrix products run at full speed only on operands that are multiples of 16 bytes.
_RANK_ALIGNMENT = 8

#: Tensors begin at multiples of this in the packed bytes.
_ALIGNMENT_BYTES = 16

#: A change of one layer and its LoRA's strength; the same of low rank, up [out, rank] and down.
Weighted = tuple[float, WeightDelta]
WeightedFactors = tuple[float, Factors]


#: Memory for changes in float32 while they are merged, or one layer's, 157 MB at most in SD1.5.
#: More takes fewer launches: at the end of a round of 16 images, hundreds for each slot.
TEMPORARY_BYTES = 128 * 1024**2

#: Float32 tensors of the layers' size that are alive at once: the sum, and two of a LoHa.
_TEMPORARIES = 3

#: The merging programs that are built, by what they depend on; one thread builds each.
_built: set[object] = set()
_building: defaultdict[object, threading.Lock] = defaultdict(threading.Lock)

#: Set once one could not be built: from then on torch's operations merge.
_failed = threading.Event()

#: More than a group has.
_MANY_LAYERS = 2**20


@dataclass(frozen=True)
class Stack:
    """One kind of change of several layers, with tensors of equal shapes."""

    #: The layers' places among the weights, ascending.
    positions: Sequence[int]
    #: The positions as a tensor on the device.
    index: Tensor
    #: See `WeightDelta.tensors`.
    tensors: Tensors
    scale: float
    strength: float

    def part(self, first: int, layers: int) -> Stack | None:
        """The changes of so many *layers* from the *first* one on; None if none does."""
        begin = bisect_left(self.positions, first)
        part = slice(begin, bisect_left(self.positions, first + layers))
        if part.start == part.stop:
            return None
        tensors = {name: each[part] for name, each in self.tensors.items()}
        return replace(
            self,
            positions=self.positions[part],
            index=self.index[part],
            tensors=tensors,
        )


@dataclass(frozen=True)
class StackedChange:
    """All that a job's LoRAs change in the layers of one shape, on the device."""

    #: The plain LoRAs, one after the other along the rank.
    low_rank: Factors | None
    #: The strength of the plain LoRAs, beside the strengths that their factors contain.
    strength: float
    stacks: Sequence[Stack]

    @property
    def is_of_matrices(self) -> bool:
        """True if programs can merge it; not what depends on the weights in another way."""
        return all(
            kinds.kind_of(each.tensors) in kinds.MATRICES for each in self.stacks
        )

    def merge(
        self,
        original: Tensor,
        merged: Tensor,
        temporary_bytes: int = TEMPORARY_BYTES,
        *,
        first: int = 0,
    ) -> None:
        """Sets *merged* to the weights *original* [layers, out, in] plus the changes.

        They may be some of the layers, from the *first* one on. Summed in float32 and rounded once,
        as in `shared.Merger`. Where programs do not do it at once, *temporary_bytes* are taken.
        """
        programs_run = (
            runs_programs(original) and self.is_of_matrices and not _failed.is_set()
        )
        merge_part = self.run_programs if programs_run else self._merge_part
        count = len(original)
        # Programs write no sum but that of several stacks.
        temporaries = int(len(self.stacks) > 1) if programs_run else _TEMPORARIES
        if temporaries:
            size = temporaries * 4 * original[0].numel()
            count = max(1, temporary_bytes // size)
        for at in range(0, len(original), count):
            part = slice(at, at + count)
            merge_part(original[part], merged[part], first + at)

    def run_programs(self, original: Tensor, merged: Tensor, first: int) -> None:
        """As `merge`, of what `is_of_matrices`; tensors of the meta device: see `merging.merge`."""
        from worker.engine.kernels import merging  # it needs Triton

        part = slice(first, first + len(original))
        factors = self.low_rank and (self.low_rank[0][part], self.low_rank[1][part])
        terms = []
        for stack in self._stacks_of(first, len(original)):
            kind = kinds.kind_of(stack.tensors)
            matrices = kinds.MATRICES[kind](stack.tensors)
            norms = kinds.norms_of(stack.tensors)
            terms.append(
                merging.Term(
                    stack.index, kind, matrices, norms, stack.scale, stack.strength
                )
            )
        merging.merge(original, merged, factors, self.strength, terms, first=first)

    def _stacks_of(self, first: int, layers: int) -> list[Stack]:
        parts = (each.part(first, layers) for each in self.stacks)
        return [each for each in parts if each is not None]

    def _merge_part(self, original: Tensor, merged: Tensor, first: int) -> None:
        total = original.to(torch.float32, copy=True)
        if self.low_rank is not None:
            part = slice(first, first + len(original))
            up, down = self.low_rank
            total.add_(kinds.multiply(up[part], down[part]), alpha=self.strength)
        for stack in self._stacks_of(first, len(original)):
            places = stack.index - first
            own = original.index_select(0, places)
            changes = kinds.compute(stack.tensors, stack.scale, own)
            total.index_add_(0, places, changes, alpha=stack.strength)
        merged.copy_(total)


class Room:
    """Lays out tensors in one tensor of bytes."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def place(self, dtype: torch.dtype, *shape: int) -> Place:
        begin = self.size_bytes
        end = begin + math.prod(shape) * dtype.itemsize
        self.size_bytes = end + -end % _ALIGNMENT_BYTES
        return Place(dtype, shape, begin, end)

    def place_low_rank(
        self,
        dtype: torch.dtype,
        layers: int,
        by_layer: Mapping[int, Sequence[WeightedFactors]],
        strength: float,
    ) -> LowRank:
        """Changes of some of the *layers*, by their numbers."""
        ((_, (up, down)), *_) = next(iter(by_layer.values()))
        rank = max(map(_rank, by_layer.values()))
        rank += -rank % _RANK_ALIGNMENT
        ups = self.place(dtype, layers, len(up), rank)
        downs = self.place(dtype, layers, rank, len(down[0]))
        return LowRank(ups, downs, strength, by_layer)

    def place_stack(self, by_layer: Mapping[int, Weighted]) -> StackPlaces:
        """Changes of one other kind than plain LoRAs, with tensors of equal shapes."""
        count = len(by_layer)
        _, delta = next(iter(by_layer.values()))
        index = self.place(torch.int64, count)
        tensors = {
            name: self.place(tensor.dtype, count, *_as_linear(tensor.shape))
            for name, tensor in delta.tensors.items()
        }
        return StackPlaces(by_layer, index, tensors)


@dataclass(frozen=True)
class LowRank:
    """Plain LoRAs' changes of the layers of one group or shape, and the places of their factors."""

    up: Place
    down: Place
    #: Factor of the products of up and down.
    strength: float
    by_layer: Mapping[int, Sequence[WeightedFactors]]

    def of(self, flat: Tensor) -> Factors:
        """Views of up [layers, out, rank] and down [layers, rank, inputs]."""
        return self.up.of(flat), self.down.of(flat)

    def fill(self, flat: Tensor) -> None:
        """Sets the factors; zero where nothing changes."""
        up, down = self.of(flat)
        layers, _, rank = up.shape
        ranks = [_rank(changes) for changes in self.by_layer.values()]
        if len(ranks) < layers or min(ranks) < rank:
            up.zero_()
            down.zero_()
        parts = {}
        copies = []
        for layer, changes in self.by_layer.items():
            begin = 0
            for strength, (outer, inner) in changes:
                end = begin + len(inner)
                if (begin, end) not in parts:
                    columns = slice(begin, end)
                    parts[begin, end] = (
                        up[:, :, columns].unbind(),
                        down[:, columns].unbind(),
                    )
                ups, downs = parts[begin, end]
                # A small strength would take float16 to its smallest numbers: half of it goes to
                # each factor, to one of them as a power of two, which is exact.
                _, exponent = math.frexp(strength / self.strength)
                half = 2.0 ** (exponent // 2)
                rest = strength / self.strength / half
                copies += _scaled(ups[layer], outer, rest)
                copies += _scaled(downs[layer], inner, half)
                begin = end
        if copies:  # one call for each would take longer than most copies
            targets, sources = zip(*copies, strict=True)
            torch._foreach_copy_(list(targets), list(sources))


def _scaled(
    target: Tensor, source: Tensor, factor: float
) -> list[tuple[Tensor, Tensor]]:
    """Sets *target* to *factor* times *source*, rounded once; for 1, the copy to be made."""
    if factor == 1:
        return [(target, source)]
    exact = source if source.dtype == target.dtype else source.float()
    torch.mul(exact, factor, out=target)
    return []


@dataclass(frozen=True)
class StackPlaces:
    """Places of a `Stack` in one tensor of bytes."""

    by_layer: Mapping[int, Weighted]
    index: Place
    tensors: Mapping[str, Place]

    @property
    def variant(self) -> object:
        """What the programs that merge it depend on."""
        # DoRA's norms of the inputs have one row.
        return tuple(
            (name, place.dtype, place.shape[1] == 1)
            for name, place in self.tensors.items()
        )

    def of(self, flat: Tensor) -> Stack:
        tensors = {name: place.of(flat) for name, place in self.tensors.items()}
        strength, delta = next(iter(self.by_layer.values()))
        return Stack(
            list(self.by_layer), self.index.of(flat), tensors, delta.scale, strength
        )

    def fill(self, flat: Tensor) -> None:
        """Sets the tensors of the stack, layer by layer."""
        stack = self.of(flat)
        stack.index.copy_(torch.tensor(stack.positions))
        deltas = [delta for _, delta in self.by_layer.values()]
        for name, tensor in stack.tensors.items():
            shape = tensor.shape[1:]
            sources = [delta.tensors[name].view(shape) for delta in deltas]
            torch._foreach_copy_(tensor.unbind(), sources)


class LoraChanges(NamedTuple):
    """A job's LoRA deltas for one network, as views of one tensor on the device."""

    stacked: Mapping[Group, StackedChange]
    #: Up [layers, out, rank] and down [layers, rank, in * taps].
    beside: Mapping[Shape, Factors]


NO_CHANGES = LoraChanges(MappingProxyType({}), MappingProxyType({}))


@dataclass(frozen=True)
class PackedLoras:
    """LoRA deltas for one network, laid out in one tensor of bytes.

    The numbers stay in the files' tensors until the tensor is assembled: up to four jobs a slot are
    held, which would be gigabytes.
    """

    size_bytes: int
    _low_rank: Mapping[Group, LowRank]
    _stacks: Mapping[Group, Sequence[StackPlaces]]
    _beside: Mapping[Shape, LowRank]
    #: The ranks of the changes that slots hold beside the weights.
    ranks: Mapping[Shape, int]
    #: Of the weights.
    dtype: torch.dtype

    def assemble(self) -> Tensor:
        """The tensor [size_bytes] in host memory."""
        flat = safetensors.packs.take(self.size_bytes)
        for plain in (*self._low_rank.values(), *self._beside.values()):
            plain.fill(flat)
        for places in itertools.chain.from_iterable(self._stacks.values()):
            places.fill(flat)
        return flat

    def build(self, device: torch.device) -> None:
        """Has the programs built that merge these, where a *device* runs any.

        It takes a second for each kind of change: ticks would wait at the first such job.
        """
        if _failed.is_set() or not builds_programs(device):
            return
        needed = {group: self._variant(group) for group in self._groups}
        if _built.issuperset(needed.values()):
            return
        flat = torch.empty(self.size_bytes, dtype=torch.uint8, device="meta")
        for group, change in self.of(flat).stacked.items():
            known = needed[group]
            with _building[known]:
                if known not in _built and change.is_of_matrices:
                    _, *sides = group
                    shape = (_MANY_LAYERS, *sides)
                    weights = torch.empty(shape, dtype=self.dtype, device="meta")
                    try:
                        change.run_programs(weights, weights, 0)
                    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
                        _failed.set()
                        log.warning(
                            f"LoRAs are merged without fused kernels: {error}",
                            exc_info=error,
                            action="compile_failed",
                        )
                _built.add(known)

    @property
    def _groups(self) -> Iterable[Group]:
        """Those whose weights it changes, in the order of their merging."""
        return dict.fromkeys([*self._low_rank, *self._stacks])

    def _variant(self, group: Group) -> object:
        """What the programs that merge a group's changes depend on."""
        stacks = self._stacks.get(group, ())
        return self.dtype, group[-1] == 1, *(each.variant for each in stacks)

    def of(self, flat: Tensor) -> LoraChanges:
        """Views of *flat*, a copy on any device."""
        stacked = {}
        for group in self._groups:
            plain = self._low_rank.get(group)
            stacked[group] = StackedChange(
                plain.of(flat) if plain else None,
                plain.strength if plain else 1.0,
                [each.of(flat) for each in self._stacks.get(group, ())],
            )
        beside = {shape: each.of(flat) for shape, each in self._beside.items()}
        return LoraChanges(stacked, beside)


def pack(
    loras: Sequence[AppliedLora], groups: Groups, *, dtype: torch.dtype
) -> PackedLoras | None:
    """The changes of *loras* at their strengths; None if no slot can hold one of them.

    Plain LoRAs are packed as *dtype*, and so is all that is of low rank beside a `Shape`'s weights;
    other kinds of a `Group`'s as they are in the file.
    """
    known = {
        path: (group, at)
        for group, paths in groups.items()
        for at, path in enumerate(paths)
    }
    of_low_rank: defaultdict[Group | Shape, dict[int, list[WeightedFactors]]]
    of_low_rank = defaultdict(lambda: defaultdict(list))
    others: defaultdict[Group, dict[int, list[Weighted]]]
    others = defaultdict(lambda: defaultdict(list))
    for lora in loras:
        for path, delta in lora.deltas.items():
            strength = lora.weight * delta.scale
            tensors = delta.tensors
            if path not in known:
                return None
            group, at = known[path]
            if isinstance(group, Shape):
                factors = kinds.factorise(tensors, group.max_rank)
                if factors is None:
                    return None
            elif tensors.keys() == {"down", "up"}:
                factors = _flat(tensors["up"]), _flat(tensors["down"])
            else:
                others[group][at].append((lora.weight, delta))
                continue
            of_low_rank[group][at].append((strength, factors))
    room = Room()
    low_rank = {}
    beside = {}
    ranks = {}
    for group, changes in of_low_rank.items():
        layers = len(groups[group])
        if isinstance(group, Shape):
            beside[group] = placed = room.place_low_rank(dtype, layers, changes, 1.0)
            ranks[group] = placed.up.shape[2]
            if ranks[group] > group.max_rank:
                return None
            continue
        # The device multiplies by the largest, so that most jobs' factors are copied as they are.
        strengths = [strength for each in changes.values() for strength, _ in each]
        largest = max(strengths, key=abs) or 1.0
        low_rank[group] = room.place_low_rank(dtype, layers, changes, largest)
    stacks = {
        group: [room.place_stack(alike) for alike in _alike(by_layer)]
        for group, by_layer in others.items()
    }
    return PackedLoras(room.size_bytes, low_rank, stacks, beside, ranks, dtype)


def _alike(
    by_layer: Mapping[int, Sequence[Weighted]],
) -> Collection[Mapping[int, Weighted]]:
    """Groups deltas of equal names, shapes, scales and strengths, at most one a layer each."""
    alike: dict[object, dict[int, Weighted]] = {}
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


def _flat(factor: Tensor) -> Tensor:
    """A factor as a matrix. Those of linear layers are one: 384 calls a job would add up."""
    is_matrix = factor.dim() == 2  # noqa: PLR2004
    return factor if is_matrix else factor.flatten(1)


def _as_linear(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without a 1x1 kernel: such convolutions are stacked with linear layers."""
    matrix = 2
    is_linear = math.prod(shape[matrix:]) == 1
    return tuple(shape[:matrix] if is_linear else shape)


def _rank(weighted: Iterable[WeightedFactors]) -> int:
    return sum(down.shape[0] for _, (_, down) in weighted)

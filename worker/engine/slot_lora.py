"""LoRAs as data: a job's changes of one network, packed into one tensor that is copied at once.

Only changes of low rank on layers that slots can have of their own; other kinds (LoHa, LoKr, DoRA,
changes of convolutions, too high a rank) are merged into the shared weights, see `lora.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine import lora
from worker.engine.lora_kinds import Change
from worker.engine.lora_names import Network, adaptable_layers
from worker.engine.slot_linear import Factors

#: Matrix products need their operands at multiples of 16 bytes to run at full speed.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """The low-rank changes of one network, in one tensor: page-locked where it goes to a GPU."""

    flat: torch.Tensor
    shapes: Mapping[str, tuple[int, int, int]]
    """By layer: out, rank, in. The factors follow each other in this order, up before down."""

    def factors(self, flat: torch.Tensor) -> dict[str, Factors]:
        """Views of *flat*, a copy of it on any device."""
        factors, at = {}, 0
        for path, (outer, rank, inner) in self.shapes.items():
            up = flat[at : at + outer * rank].view(outer, rank)
            at += outer * rank
            factors[path] = (up, flat[at : at + rank * inner].view(rank, inner))
            at += rank * inner
        return factors


def restrict(loras: Sequence[lora.Applied], network: Network) -> tuple[lora.Applied, ...]:
    """What of some LoRAs changes one network; nothing of those that change the other alone."""
    others: dict[Network, float] = {"unet": 0.0, "text_encoder": 0.0}
    return tuple(
        lora.Applied(applied.file, {**others, network: weight})
        for applied in loras
        if (weight := applied.weights[network]) and applied.file.changes[network]
    )


def pack(
    loras: Sequence[lora.Applied],
    network: Network,
    layers: Collection[str],
    *,
    rank_capacity: int,
    dtype: torch.dtype,
    pinned: bool,
) -> Packed | None:
    """The changes of *loras*, their strengths included; None where they are not of low rank."""
    weighted: dict[str, list[tuple[float, Change]]] = {}
    for applied in loras:
        for path, change in applied.file.changes[network].items():
            if path not in layers or change.parts.keys() != {"down", "up"}:
                return None
            weighted.setdefault(path, []).append((applied.weights[network], change))
    shapes = {}
    for path, changes in weighted.items():
        rank = sum(len(change.parts["down"]) for _, change in changes)
        if rank > rank_capacity:
            return None
        first = changes[0][1].parts
        rank += -rank % _ALIGNMENT
        shapes[path] = (len(first["up"]), rank, first["down"].flatten(1).shape[1])
    size = sum((outer + inner) * rank for outer, rank, inner in shapes.values())
    packed = Packed(torch.zeros(size, dtype=dtype, pin_memory=pinned), shapes)
    for path, (up, down) in packed.factors(packed.flat).items():
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

    @property
    def paths(self) -> Collection[str]:
        return self._weights.keys()

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

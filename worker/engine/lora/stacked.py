"""What LoRAs of any kind change in many layers of one shape, merged into all of them at once.

On a GPU the hundreds of layers of a network are a few stacks: a launch for each layer would take
longer than the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engine.lora import kinds

#: A low-rank weight change: up [..., out, rank] and down [..., rank, in].
Factors = tuple[torch.Tensor, torch.Tensor]

#: Memory for changes in float32 while they are merged, or one layer's, 157 MB at most in SD1.5.
#: More takes fewer launches: at the end of a round of 16 images, hundreds for each slot.
TEMPORARY_BYTES = 128 * 1024**2

#: Float32 tensors of the layers' size that are alive at once: the sum, and two of a LoHa.
_TEMPORARIES = 3


@dataclass(frozen=True, slots=True)
class Stack:
    """One kind of change of several layers, with tensors of equal shapes."""

    positions: Sequence[int]
    """The layers' places among the weights, ascending."""
    index: torch.Tensor
    """The same, on the device."""
    tensors: kinds.Tensors
    """See `WeightDelta.tensors`."""
    scale: float
    strength: float

    def compute(self, original: torch.Tensor, at: int) -> torch.Tensor | None:
        """The changes in float32 of the layers from *at* on, with *original* [layers, out, in].

        Zero where a layer does not change, None if none does.
        """
        begin = bisect_left(self.positions, at)
        part = slice(begin, bisect_left(self.positions, at + len(original)))
        count = part.stop - part.start
        if not count:
            return None
        tensors = {name: each[part] for name, each in self.tensors.items()}
        if count == len(original):
            return kinds.compute(tensors, self.scale, original)
        index = self.index[part] - at
        changes = kinds.compute(tensors, self.scale, original.index_select(0, index))
        return torch.zeros_like(original, dtype=torch.float32).index_copy_(0, index, changes)


@dataclass(frozen=True, slots=True)
class StackedChange:
    """All that a job's LoRAs change in the layers of one shape, on the device."""

    low_rank: Factors | None
    """The plain LoRAs, one after the other along the rank."""
    strength: float
    """The strength of the plain LoRAs, beside the strengths that their factors contain."""
    stacks: Sequence[Stack]

    def merge(
        self,
        original: torch.Tensor,
        merged: torch.Tensor,
        temporary_bytes: int = TEMPORARY_BYTES,
        *,
        first: int = 0,
    ) -> None:
        """Sets *merged* to the weights *original* [layers, out, in] plus the changes.

        They may be some of the layers, from the *first* one on. Summed in float32 and rounded once,
        like `Merger`. Other kinds than plain LoRAs take *temporary_bytes* meanwhile.
        """
        if not self.stacks and self.low_rank is not None:
            up, down = (each[first : first + len(original)] for each in self.low_rank)
            torch.baddbmm(original, up, down, alpha=self.strength, out=merged)
            return
        size = _TEMPORARIES * 4 * original[0].numel()
        count = max(1, temporary_bytes // size)
        for at in range(0, len(original), count):
            part = slice(at, at + count)
            self._merge_part(original[part], merged[part], first + at)

    def add_to(self, outputs: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the plain LoRAs' change of inputs [rows, in] to *outputs* [rows, layers * out]."""
        if self.low_rank is None:
            raise ValueError("there are no plain LoRAs")
        up, down = self.low_rank
        by_layer = outputs.view(len(x), len(up), -1).transpose(0, 1)
        by_layer.baddbmm_(torch.matmul(x, down.mT), up.mT, alpha=self.strength)

    def _merge_part(self, original: torch.Tensor, merged: torch.Tensor, first: int) -> None:
        total, strength = None, 1.0
        if self.low_rank is not None:
            up, down = (each[first : first + len(original)] for each in self.low_rank)
            total, strength = kinds.multiply(up, down), self.strength
        for stack in self.stacks:
            changes = stack.compute(original, first)
            if changes is None:
                continue
            if total is None:
                total, strength = changes, stack.strength
                continue
            if strength != 1:
                total, strength = total.mul_(strength), 1.0
            total.add_(changes, alpha=stack.strength)
        if total is None:
            merged.copy_(original)
        else:
            torch.add(original, total, alpha=strength, out=merged)

"""Merges changes of LoRAs into weights in one pass over them, on a GPU with Triton.

torch's own operations write each product, sum and norm of the size of the weights to memory, in
float32: ten times what is read and written here.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.engine.kernels import programs

#: A program's tile of the weights, and how many ranks it multiplies at once. Larger ones are built
#: for twice as long, and are no faster on an H200.
_HEIGHT = 64
_WIDTH = 64
_RANKS = 32


class Term(NamedTuple):
    """A change of some of the layers: scale times what its *kind* makes of the *matrices*."""

    #: The numbers of the layers, ascending, on the device.
    numbers: Tensor
    #: Of `kinds.MATRICES`.
    kind: str
    #: Stacks [layers, rows, columns].
    matrices: Sequence[Tensor]
    #: DoRA's norms of the outputs or inputs.
    norms: Tensor | None
    scale: float
    strength: float

    @property
    def sizes(self) -> tuple[int, int]:
        """The ranks of both products, or the sides of the second matrix of Kronecker's product."""
        if self.kind == "lokr":
            _, outer, inner = self.matrices[1].shape
            return outer, inner
        first, second, *_ = [each.shape[1] for each in self.matrices[1::2]] + [1, 1]
        return first, second


def merge(
    original: Tensor,
    merged: Tensor,
    low_rank: tuple[Tensor, Tensor] | None,
    strength: float,
    terms: Sequence[Term],
    *,
    first: int,
) -> None:
    """Sets *merged* to the weights *original* [layers, out, in] plus all changes.

    These are strength times the product of *low_rank*, and the *terms*; their sum in float32 is
    rounded once. Both may be the same tensor. *first* is the number of the first of the layers. For
    tensors on the meta device, the programs are built and not run.
    """
    layers, outer, inner = original.shape
    tiles = programs.cdiv(outer, _HEIGHT), programs.cdiv(inner, _WIDTH)
    grid = tiles[0] * tiles[1], layers
    up, down = low_rank or (original, original[:, :0])
    terms = terms or [Term(original[:0], "none", (), None, 1.0, 0.0)]
    base, out = original, merged
    if len(terms) > 1:
        base = out = original.to(torch.float32, copy=True)
    for term in terms:
        # A program is given some tensor for each of its arguments, read or not.
        matrices = [*(each.contiguous() for each in term.matrices), *[original] * 4][:4]
        norms = squares = original
        kept = "none"
        if term.norms is not None:
            # They are of the outputs, or in older files of the inputs [layers, 1, inputs].
            norms = term.norms
            kept = "rows" if norms.shape[1] == outer else "columns"
            length = tiles[1] * outer if kept == "rows" else tiles[0] * inner
            squares = original.new_empty(len(norms), length, dtype=torch.float32)
        sizes = outer, inner, down.shape[1], first, len(term.numbers), *term.sizes
        factors = strength, term.scale, term.strength
        for sums in [True, False] if term.norms is not None else [False]:
            ends = (original, original) if sums else (base, out)
            tensors: Any
            tensors = original, *ends, up, down, term.numbers, *matrices, norms, squares
            run = programs.merge[grid]
            if original.is_meta:
                run = functools.partial(programs.merge.warmup, grid=grid)
                tensors = [each.dtype for each in tensors]
            run(
                *tensors, *sizes, *factors, term.kind, kept, sums,
                _HEIGHT, _WIDTH, _RANKS, num_stages=1,
            )  # fmt: skip
        down = down[:, :0]
    if len(terms) > 1:
        merged.copy_(out)

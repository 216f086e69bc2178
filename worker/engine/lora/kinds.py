"""The arithmetic of each kind of LoRA, for all layers of one shape at once.

All tensors are stacks: their first dimension is the layer. On a GPU the hundreds of layers of a
network are a few stacks: a launch for each layer would take longer than the arithmetic.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]

#: A low-rank weight change: up [..., out, rank] and down [..., rank, inputs].
Factors = tuple[torch.Tensor, torch.Tensor]

#: Tensors of any kind: a strength, and DoRA's norms by LyCORIS' and peft's name.
EXTRAS = frozenset({"alpha", "dora_scale", "magnitude"})


def is_known(names: frozenset[str]) -> bool:
    """Whether tensors of these names are a kind of change."""
    return names - EXTRAS in _PRODUCTS


def compute(tensors: Tensors, scale: float, weights: torch.Tensor) -> torch.Tensor:
    """The layers' changes at strength 1, in float32 and in new memory.

    *weights* [layers, out, in, ...] are the checkpoint's own: DoRA's change depends on them. Raises
    ValueError, RuntimeError or IndexError if the tensors do not fit each other or the weights.
    """
    changes = _PRODUCTS[frozenset(tensors) - EXTRAS](tensors).flatten(2)
    if changes.shape != weights.flatten(2).shape:
        raise ValueError(f"the change is {list(changes.shape[1:])}")
    changes = changes.reshape(weights.shape)
    if scale != 1:
        changes *= scale
    magnitudes, scales = tensors.get("magnitude"), tensors.get("dora_scale")
    if magnitudes is not None:
        return _decompose(weights, changes, magnitudes, of_outputs=True)
    if scales is not None:  # older files hold the norms of the inputs, [1, inputs, ...]
        of_outputs = scales.shape[1] == weights.shape[1]
        return _decompose(weights, changes, scales, of_outputs=of_outputs)
    return changes


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The products of two stacks of matrices in float32."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in _HALVES and _has_float_sums():
        # The factors' products are exact in float32, here on matrix units.
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


_HALVES = (torch.float16, torch.bfloat16)


def _has_float_sums() -> bool:
    # torch refuses it where matrix products are summed in float16.
    in_float16 = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return _has_out_dtype() and not in_float16


@functools.cache
def _has_out_dtype() -> bool:
    return hasattr(torch.ops.aten.bmm, "dtype")  # torch 2.8


def factorise(change: Tensors, most: int) -> Factors | None:
    """One layer's change as up [out, rank] and down [rank, inputs of all taps], without its scale.

    Products of low-rank parts are of low rank, too: elementwise ones (LoHa) and Kronecker's (LoKr)
    at most of the product of their ranks. None where that is above *most*, for DoRA and for whole
    differences.
    """
    product = _PRODUCTS.get(frozenset(change), _full)
    if product is _full:
        return None
    tensors = {name: each[None] for name, each in change.items()}
    if product is _lora:
        parts = [_lora_factors(tensors)]
    else:
        parts = [
            _half_factors(tensors, "hada" if product is _loha else "lokr", half) for half in "12"
        ]
    if math.prod(down.shape[1] for _, down in parts) > most:
        return None
    if change.keys() == {"down", "up"}:
        ((up, down),) = parts
        return up[0], down[0]
    ups, downs = (
        [each[0].float().contiguous() for each in side] for side in zip(*parts, strict=True)
    )
    if product is _loha:
        return _balanced(
            (ups[0][:, :, None] * ups[1][:, None]).flatten(1),
            (downs[0][:, None] * downs[1][None]).flatten(0, 1),
        )
    # Kronecker's; the second half's columns end with the kernel, as a weight's do.
    return _balanced(functools.reduce(torch.kron, ups), functools.reduce(torch.kron, downs))


def _balanced(up: torch.Tensor, down: torch.Tensor) -> Factors:
    """The same product by factors of one size: neither underflows in float16."""
    smallest = torch.finfo(torch.float32).tiny
    sizes = [each.clamp_min(smallest).sqrt() for each in (up.abs().amax(0), down.abs().amax(1))]
    ratio = sizes[1] / sizes[0]
    return up * ratio, down / ratio[:, None]


def _lora(tensors: Tensors) -> torch.Tensor:
    return multiply(*_lora_factors(tensors))


def _loha(tensors: Tensors) -> torch.Tensor:
    return _half(tensors, "hada", "1").mul_(_half(tensors, "hada", "2"))


def _lokr(tensors: Tensors) -> torch.Tensor:
    first, second = _half(tensors, "lokr", "1"), _half(tensors, "lokr", "2")
    # Kronecker products; the second half's columns end with the kernel, as a weight's do.
    blocks = first[:, :, None, :, None] * second[:, None, :, None, :]
    return blocks.flatten(3, 4).flatten(1, 2)


def _half(tensors: Tensors, kind: str, half: str) -> torch.Tensor:
    if (whole := tensors.get(f"{kind}_w{half}")) is not None:
        return whole.float().flatten(2)
    return multiply(*_half_factors(tensors, kind, half))


def _lora_factors(tensors: Tensors) -> Factors:
    up, down = tensors["up"].flatten(2), tensors["down"].flatten(2)
    return (up, _with_core(tensors["mid"], down)) if "mid" in tensors else (up, down)


def _half_factors(tensors: Tensors, kind: str, half: str) -> Factors:
    if (whole := tensors.get(f"{kind}_w{half}")) is not None:
        whole = whole.flatten(2)
        _, outer, inner = whole.shape
        identity = torch.eye(min(outer, inner), device=whole.device)[None]
        return (identity, whole) if outer <= inner else (whole, identity)
    first, second = tensors[f"{kind}_w{half}_a"], tensors[f"{kind}_w{half}_b"].flatten(2)
    core = tensors.get(f"{kind}_t{half}")
    return (first, second) if core is None else (first.mT, _with_core(core, second))


def _with_core(core: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Cores [layers, rank, other rank, *kernel] and inner [.., other rank, in]: [.., rank, inputs].

    Tucker's form; the inputs are those of all taps of the kernel.
    """
    product = torch.einsum("nrs...,nsi->nri...", core.float(), inner.float())
    return product.flatten(2)


def _full(tensors: Tensors) -> torch.Tensor:
    return tensors["diff"].to(torch.float32, copy=True)


def _decompose(
    weights: torch.Tensor, changes: torch.Tensor, norms: torch.Tensor, *, of_outputs: bool
) -> torch.Tensor:
    """DoRA: the changed weights rescaled to *norms*, minus the original ones; in *changes*.

    The strength multiplies this difference, as in AUTOMATIC1111; in peft it is inside the norm.
    """
    weights = weights.float()  # sums of two types take twice as long
    changed = changes.add_(weights)
    kept = 1 if of_outputs else 2
    others = [dim for dim in range(1, weights.ndim) if dim != kept]
    own = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
    smallest = torch.finfo(torch.float32).tiny
    changed *= norms.float().reshape(own.shape) / own.clamp_min_(smallest)
    return changed.sub_(weights)


_LOHA = frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
_LOKR_HALVES = (
    ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}),
    ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"}),
)

#: The kinds, by the names of their tensors.
_PRODUCTS: Mapping[frozenset[str], Callable[[Tensors], torch.Tensor]] = {
    frozenset({"down", "up"}): _lora,
    frozenset({"down", "up", "mid"}): _lora,
    _LOHA: _loha,
    _LOHA | {"hada_t1", "hada_t2"}: _loha,
    frozenset({"diff"}): _full,
    **{frozenset(one | two): _lokr for one in _LOKR_HALVES[0] for two in _LOKR_HALVES[1]},
}


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
    tensors: Tensors
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
            return compute(tensors, self.scale, original)
        index = self.index[part] - at
        changes = compute(tensors, self.scale, original.index_select(0, index))
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
            total, strength = multiply(up, down), self.strength
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

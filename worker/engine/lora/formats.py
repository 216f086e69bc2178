"""The kinds of change that LoRA files make to a layer's weight, each worked out as one dense sum.

LoRA and LoCon (also in kohya's Tucker form), LoHa, LoKr and whole differences, as LyCORIS and
kohya's scripts write them; each with DoRA's magnitudes or without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]

#: Beside what makes up the kind: a strength, and DoRA's norms in LyCORIS' and in peft's name.
_EXTRAS = frozenset({"alpha", "dora_scale", "magnitude"})

#: Parts whose first dimension is the rank; the alpha of a change that has none of them is void.
_RANKED = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """What happens to one layer: weight += strength * delta(weight).

    The parts are on the CPU, in the file's own type; which there are depends on the kind.
    """

    parts: Tensors
    scale: float

    def delta(self, weight: torch.Tensor) -> torch.Tensor:
        """The change at strength 1, in float32, of the shape and on the device of *weight*.

        *weight* is the checkpoint's own, in float32: what DoRA adds depends on it.

        Raises:
            ValueError, RuntimeError, IndexError: the parts do not fit each other or the weight.
        """
        parts = {name: part.to(weight.device, torch.float32) for name, part in self.parts.items()}
        product = _PRODUCTS[frozenset(parts) - _EXTRAS](parts).flatten(1)
        if product.shape != weight.flatten(1).shape:
            raise ValueError(f"the change is {list(product.shape)}")
        delta = self.scale * product.reshape(weight.shape)
        magnitude, scale = parts.get("magnitude"), parts.get("dora_scale")
        if magnitude is not None:
            return _decomposed(weight, delta, magnitude, of_outputs=True)
        if scale is not None:  # older files hold the norms of the inputs, [1, inputs, ...]
            return _decomposed(weight, delta, scale, of_outputs=len(scale) == len(weight))
        return delta


def make_change(parts: Tensors, alpha: float | None, *, by_root: bool = False) -> WeightDelta:
    """The change that a layer's parts describe; *alpha* counts where they have none of their own.

    *by_root* divides it by the rank's root (rsLoRA) instead of by the rank.

    Raises:
        ValueError: they are the parts of no kind, or not all of them.
    """
    if frozenset(parts) - _EXTRAS not in _PRODUCTS:
        raise ValueError("these are the parts of no kind")
    if "alpha" in parts:
        alpha = float(parts["alpha"].item())
    rank = next((len(parts[name]) for name in _RANKED if name in parts), None)
    kept = {name: part for name, part in parts.items() if name != "alpha"}
    if alpha is None or rank is None:
        return WeightDelta(kept, 1.0)
    if rank == 0:
        raise ValueError("the rank is 0")
    return WeightDelta(kept, alpha / (rank**0.5 if by_root else rank))


def _lora(parts: Tensors) -> torch.Tensor:
    down, up = parts["down"].flatten(1), parts["up"].flatten(1)
    return _tucker(parts["mid"], up.T, down) if "mid" in parts else up @ down


def _loha(parts: Tensors) -> torch.Tensor:
    return _loha_half(parts, "1") * _loha_half(parts, "2")


def _loha_half(parts: Tensors, half: str) -> torch.Tensor:
    first, second = parts[f"hada_w{half}_a"], parts[f"hada_w{half}_b"]
    core = parts.get(f"hada_t{half}")
    return first @ second.flatten(1) if core is None else _tucker(core, first, second)


def _lokr(parts: Tensors) -> torch.Tensor:
    first, second = _lokr_half(parts, "1"), _lokr_half(parts, "2")
    # The kernel is last in the second half's columns, as it is in a weight's.
    return torch.kron(first, second)


def _lokr_half(parts: Tensors, half: str) -> torch.Tensor:
    if (whole := parts.get(f"lokr_w{half}")) is not None:
        return whole.flatten(1)
    first, second = parts[f"lokr_w{half}_a"], parts[f"lokr_w{half}_b"]
    core = parts.get(f"lokr_t{half}")
    return first @ second.flatten(1) if core is None else _tucker(core, first, second).flatten(1)


def _full(parts: Tensors) -> torch.Tensor:
    return parts["diff"]


def _tucker(core: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """From core [rank, rank, *kernel], outer [rank, outputs], inner [rank, inputs]."""
    product: torch.Tensor = torch.einsum("rs...,ro,si->oi...", core, outer, inner)
    return product


def _decomposed(
    weight: torch.Tensor, delta: torch.Tensor, norms: torch.Tensor, *, of_outputs: bool
) -> torch.Tensor:
    """DoRA: the changed weight with norms of its own, less the weight it began as.

    The strength multiplies the difference, as in A1111; in peft it is inside the norm.
    """
    changed = weight + delta
    others = [dim for dim in range(weight.ndim) if dim != (0 if of_outputs else 1)]
    own = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
    smallest = torch.finfo(torch.float32).tiny
    renormed: torch.Tensor = changed * (norms.reshape(own.shape) / own.clamp_min(smallest))
    return renormed - weight


_LOHA = frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
_LOKR_HALVES = (
    ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}),
    ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"}),
)

#: By the parts that there are: what has other parts is of no kind that is known here.
_PRODUCTS: Mapping[frozenset[str], Callable[[Tensors], torch.Tensor]] = {
    frozenset({"down", "up"}): _lora,
    frozenset({"down", "up", "mid"}): _lora,
    _LOHA: _loha,
    _LOHA | {"hada_t1", "hada_t2"}: _loha,
    frozenset({"diff"}): _full,
    **{frozenset(one | two): _lokr for one in _LOKR_HALVES[0] for two in _LOKR_HALVES[1]},
}

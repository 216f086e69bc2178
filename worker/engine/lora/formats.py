"""The kinds of weight change in LoRA files, each computed as one dense delta.

LoRA and LoCon (also in kohya's Tucker form), LoHa, LoKr and full differences, as LyCORIS and
kohya's scripts write them; each with or without DoRA's magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]

#: Tensors of any kind: a strength, and DoRA's norms by LyCORIS' and peft's name.
_EXTRAS = frozenset({"alpha", "dora_scale", "magnitude"})

#: Tensors whose first dimension is the rank; without any of them, alpha means nothing.
_RANKED = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """One layer's change: weight += strength * compute(weight).

    The tensors are on the CPU in the file's type; their names depend on the kind.
    """

    tensors: Tensors
    scale: float

    def compute(self, weight: torch.Tensor) -> torch.Tensor:
        """The change at strength 1 in float32, with the shape and device of *weight*.

        *weight* is the checkpoint's own in float32: DoRA's change depends on it.

        Raises:
            ValueError, RuntimeError, IndexError: the tensors do not fit each other or the weight.
        """
        tensors = {
            name: each.to(weight.device, torch.float32) for name, each in self.tensors.items()
        }
        product = _PRODUCTS[frozenset(tensors) - _EXTRAS](tensors).flatten(1)
        if product.shape != weight.flatten(1).shape:
            raise ValueError(f"the change is {list(product.shape)}")
        delta = self.scale * product.reshape(weight.shape)
        magnitude, scale = tensors.get("magnitude"), tensors.get("dora_scale")
        if magnitude is not None:
            return _decomposed(weight, delta, magnitude, of_outputs=True)
        if scale is not None:  # older files hold the norms of the inputs, [1, inputs, ...]
            return _decomposed(weight, delta, scale, of_outputs=len(scale) == len(weight))
        return delta


def make_delta(tensors: Tensors, alpha: float | None, *, by_root: bool = False) -> WeightDelta:
    """The change that a layer's tensors describe; *alpha* applies if they have none.

    *by_root* divides alpha by the square root of the rank (rsLoRA), not by the rank.

    Raises:
        ValueError: the tensors are of no known kind, or incomplete.
    """
    if frozenset(tensors) - _EXTRAS not in _PRODUCTS:
        raise ValueError("the tensors are of no known kind")
    if "alpha" in tensors:
        alpha = float(tensors["alpha"].item())
    rank = next((len(tensors[name]) for name in _RANKED if name in tensors), None)
    kept = {name: tensor for name, tensor in tensors.items() if name != "alpha"}
    if alpha is None or rank is None:
        return WeightDelta(kept, 1.0)
    if rank == 0:
        raise ValueError("the rank is 0")
    return WeightDelta(kept, alpha / (rank**0.5 if by_root else rank))


def _lora(tensors: Tensors) -> torch.Tensor:
    down, up = tensors["down"].flatten(1), tensors["up"].flatten(1)
    return _tucker(tensors["mid"], up.T, down) if "mid" in tensors else up @ down


def _loha(tensors: Tensors) -> torch.Tensor:
    return _loha_half(tensors, "1") * _loha_half(tensors, "2")


def _loha_half(tensors: Tensors, half: str) -> torch.Tensor:
    first, second = tensors[f"hada_w{half}_a"], tensors[f"hada_w{half}_b"]
    core = tensors.get(f"hada_t{half}")
    return first @ second.flatten(1) if core is None else _tucker(core, first, second)


def _lokr(tensors: Tensors) -> torch.Tensor:
    first, second = _lokr_half(tensors, "1"), _lokr_half(tensors, "2")
    # The second half's columns end with the kernel, as a weight's do.
    return torch.kron(first, second)


def _lokr_half(tensors: Tensors, half: str) -> torch.Tensor:
    if (whole := tensors.get(f"lokr_w{half}")) is not None:
        return whole.flatten(1)
    first, second = tensors[f"lokr_w{half}_a"], tensors[f"lokr_w{half}_b"]
    core = tensors.get(f"lokr_t{half}")
    return first @ second.flatten(1) if core is None else _tucker(core, first, second).flatten(1)


def _full(tensors: Tensors) -> torch.Tensor:
    return tensors["diff"]


def _tucker(core: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Core [rank, rank, *kernel], outer [rank, out], inner [rank, in] to [out, in, *kernel]."""
    product: torch.Tensor = torch.einsum("rs...,ro,si->oi...", core, outer, inner)
    return product


def _decomposed(
    weight: torch.Tensor, delta: torch.Tensor, norms: torch.Tensor, *, of_outputs: bool
) -> torch.Tensor:
    """DoRA: the changed weight rescaled to *norms*, minus the original weight.

    The strength multiplies this difference, as in AUTOMATIC1111; in peft it is inside the norm.
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

#: The kinds, by the names of their tensors.
_PRODUCTS: Mapping[frozenset[str], Callable[[Tensors], torch.Tensor]] = {
    frozenset({"down", "up"}): _lora,
    frozenset({"down", "up", "mid"}): _lora,
    _LOHA: _loha,
    _LOHA | {"hada_t1", "hada_t2"}: _loha,
    frozenset({"diff"}): _full,
    **{frozenset(one | two): _lokr for one in _LOKR_HALVES[0] for two in _LOKR_HALVES[1]},
}

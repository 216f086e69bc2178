"""Weight changes as two factors, up [out, rank] and down [rank, inputs], where that is exact.

LoRA and LoCon are given as such. Products of low-rank parts are of low rank, too: elementwise ones
(LoHa) and Kronecker's (LoKr) at most of the product of their ranks.
"""

from __future__ import annotations

import torch

from worker.engine.lora.file import Tensors, WeightDelta

#: A weight change: up [out, rank] and down [rank, inputs of all taps of the kernel].
Factors = tuple[torch.Tensor, torch.Tensor]

_LORA = frozenset({"down", "up"})
_KINDS_WITH_HALVES = ("hada", "lokr")


def factorise(delta: WeightDelta, most: int) -> Factors | None:
    """The factors of *delta* at strength 1, without its scale; None if their rank is above *most*.

    DoRA and whole differences have none.
    """
    tensors = delta.tensors
    if tensors.keys() == _LORA:
        up, down = tensors["up"].flatten(1), tensors["down"].flatten(1)
        return (up, down) if len(down) <= most else None
    if tensors.keys() == _LORA | {"mid"}:
        up = tensors["up"].flatten(1)
        if up.shape[1] > most:
            return None
        return _balanced(up, _with_core(tensors["mid"], tensors["down"].flatten(1)))
    kinds = {name.split("_")[0] for name in tensors}
    for kind in _KINDS_WITH_HALVES:
        if kinds == {kind}:
            one, other = (_half(tensors, kind, half) for half in ("1", "2"))
            if len(one[1]) * len(other[1]) > most:
                return None
            multiply = _hadamard if kind == "hada" else _kronecker
            return _balanced(*multiply(*one, *other))
    return None


def _half(tensors: Tensors, kind: str, half: str) -> Factors:
    if (whole := tensors.get(f"{kind}_w{half}")) is not None:
        whole = whole.flatten(1)
        outer, inner = whole.shape
        if outer <= inner:
            return torch.eye(outer), whole
        return whole, torch.eye(inner)
    first, second = tensors[f"{kind}_w{half}_a"], tensors[f"{kind}_w{half}_b"].flatten(1)
    core = tensors.get(f"{kind}_t{half}")
    return (first, second) if core is None else (first.T, _with_core(core, second))


def _with_core(core: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Core [rank, other rank, *kernel] and inner [other rank, in] as [rank, in * taps]."""
    return torch.einsum("rs...,si->ri...", core.float(), inner.float()).flatten(1)


def _hadamard(
    up: torch.Tensor, down: torch.Tensor, other_up: torch.Tensor, other_down: torch.Tensor
) -> Factors:
    ups = up.float()[:, :, None] * other_up.float()[:, None]
    downs = down.float()[:, None] * other_down.float()[None]
    return ups.flatten(1), downs.flatten(0, 1)


def _kronecker(
    up: torch.Tensor, down: torch.Tensor, other_up: torch.Tensor, other_down: torch.Tensor
) -> Factors:
    # The second half's columns end with the kernel, as a weight's do.
    return _kron(up, other_up), _kron(down, other_down)


def _kron(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.kron(one.float().contiguous(), other.float().contiguous())


def _balanced(up: torch.Tensor, down: torch.Tensor) -> Factors:
    """The same product in float32, by factors of one size: neither underflows in float16."""
    up, down = up.float(), down.float()
    smallest = torch.finfo(torch.float32).tiny
    sizes = [each.clamp_min(smallest).sqrt() for each in (up.abs().amax(0), down.abs().amax(1))]
    ratio = sizes[1] / sizes[0]
    return up * ratio, down / ratio[:, None]

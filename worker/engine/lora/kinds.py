"""The arithmetic of each kind of LoRA, for all layers of one shape at once.

All tensors are stacks: their first dimension is the layer. On a GPU the hundreds of layers of a
network are a few stacks: a launch for each layer would take longer than the arithmetic.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from imagefleet.files import lora
from worker.engine.files.safetensors import Tensors

#: A low-rank weight change: up [..., out, rank] and down [..., rank, inputs].
Factors = tuple[Tensor, Tensor]

#: Tensors of changes that depend on the weights: of DoRA, IA3, OFT and GLoRA.
OF_WEIGHTS = lora.NORMS | {
    "rescale",
    "oft_diag",
    "oft_blocks",
    "a1",
    "up_a",
    "turn",
    "weight",
}

#: Tensors whose first dimension is that of a layer's outputs, or divides it.
ROWS = frozenset({"up", "diff", "hada_w1_a", "hada_w2_a", "lokr_w1", "lokr_w1_a"})


def compute(tensors: Tensors, scale: float, weights: Tensor) -> Tensor:
    """The layers' changes at strength 1, in float32 and in new memory.

    *weights* [layers, out, in, ...] are the checkpoint's own: DoRA's change depends on them. Raises
    ValueError, RuntimeError or IndexError if the tensors do not fit each other or the weights.
    """
    changes = _PRODUCTS[kind_of(tensors)](tensors, weights).reshape(weights.shape)
    if scale != 1:
        changes *= scale
    norms = norms_of(tensors)
    if norms is None:
        return changes
    # DoRA: the changed weights rescaled to the norms, minus the original ones. The norms are of the
    # outputs, or in older files of the inputs [layers, 1, inputs, ...]. The strength multiplies the
    # difference, as in AUTOMATIC1111; in peft it is inside the norm.
    exact = weights.float()  # sums of two types take twice as long
    changed = changes.add_(exact)
    kept = 1 if norms.shape[1] == weights.shape[1] else 2
    others = [dim for dim in range(1, weights.ndim) if dim != kept]
    own = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
    smallest = torch.finfo(torch.float32).tiny
    changed *= norms.float().reshape(own.shape) / own.clamp_min_(smallest)
    return changed.sub_(exact)


def norms_of(tensors: Tensors) -> Tensor | None:
    """DoRA's norms of the outputs [layers, out, ...], or of the inputs [layers, 1, inputs, ...]."""
    if "magnitude" in tensors:
        return tensors["magnitude"].flatten(1)
    return tensors.get("dora_scale")


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """The products of two stacks of matrices in float32."""
    is_half = left.dtype == right.dtype and left.dtype in {
        torch.float16,
        torch.bfloat16,
    }
    # torch refuses it where matrix products are summed in float16.
    in_float16 = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    if left.is_cuda and is_half and _HAS_OUT_DTYPE and not in_float16:
        # The factors' products are exact in float32, here on matrix units.
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


#: Since torch 2.8.
_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")


def factorise(change: Tensors, most: int) -> Factors | None:
    """One layer's change as up [out, rank] and down [rank, inputs of all taps], without its scale.

    Products of low-rank parts are of low rank, too: elementwise ones (LoHa) and Kronecker's (LoKr)
    at most of the product of their ranks. None where that is above *most*, for DoRA and for whole
    differences, and for what depends on the weights.
    """
    kind = kind_of(change)
    if kind not in {"lora", "loha", "lokr"} or change.keys() & lora.NORMS:
        return None
    tensors = {name: each[None] for name, each in change.items()}
    if kind == "lora":
        parts = [_lora_factors(tensors)]
    else:
        prefix = "hada" if kind == "loha" else "lokr"
        parts = [_half_factors(tensors, prefix, half) for half in "12"]
    if math.prod(down.shape[1] for _, down in parts) > most:
        return None
    if change.keys() == {"down", "up"}:
        ((up, down),) = parts
        return up[0], down[0]
    ups = [up[0].float().contiguous() for up, _ in parts]
    downs = [down[0].float().contiguous() for _, down in parts]
    if kind == "loha":
        first, second = ups
        up = (first[:, :, None] * second[:, None]).flatten(1)
        first, second = downs
        down = (first[:, None] * second[None]).flatten(0, 1)
    else:
        # Kronecker's; the second half's columns end with the kernel, as a weight's do.
        up = functools.reduce(torch.kron, ups)
        down = functools.reduce(torch.kron, downs)
    # To the same magnitude, so that neither underflows in float16.
    smallest = torch.finfo(torch.float32).tiny
    up_size = up.abs().amax(0).clamp_min(smallest).sqrt()
    down_size = down.abs().amax(1).clamp_min(smallest).sqrt()
    ratio = down_size / up_size
    return up * ratio, down / ratio[:, None]


def _kronecker(first: Tensor, second: Tensor) -> Tensor:
    # The second half's columns end with the kernel, as a weight's do.
    blocks = first.float()[:, :, None, :, None] * second.float()[:, None, :, None, :]
    return blocks.flatten(3, 4).flatten(1, 2)


def _hadamard(up: Tensor, down: Tensor, other_up: Tensor, other_down: Tensor) -> Tensor:
    return multiply(up, down).mul_(multiply(other_up, other_down))


def _lora_factors(tensors: Tensors) -> Factors:
    up = tensors["up"].flatten(2)
    down = tensors["down"].flatten(2)
    if "mid" in tensors:
        return (up, _with_core(tensors["mid"], down))
    return (up, down)


def _half(tensors: Tensors, kind: str, half: str) -> Tensor:
    if (whole := tensors.get(f"{kind}_w{half}")) is not None:
        return whole.flatten(2)
    return multiply(*_half_factors(tensors, kind, half))


def _half_factors(tensors: Tensors, kind: str, half: str) -> Factors:
    if (whole := tensors.get(f"{kind}_w{half}")) is not None:
        whole = whole.flatten(2)
        _, outer, inner = whole.shape
        identity = torch.eye(min(outer, inner), device=whole.device)[None]
        if outer <= inner:
            return (identity, whole)
        return (whole, identity)
    first = tensors[f"{kind}_w{half}_a"].flatten(2)
    second = tensors[f"{kind}_w{half}_b"].flatten(2)
    core = tensors.get(f"{kind}_t{half}")
    if core is None:
        return (first, second)
    return (first.mT, _with_core(core, second))


def _with_core(core: Tensor, inner: Tensor) -> Tensor:
    """Cores [layers, rank, other rank, *kernel] and inner [.., other rank, in]: [.., rank, inputs].

    Tucker's form; the inputs are those of all taps of the kernel.
    """
    return torch.einsum("nrs...,nsi->nri...", core.float(), inner.float()).flatten(2)


def _glora(tensors: Tensors, weights: Tensor) -> Tensor:
    names = ("a2", "a1", "b2", "b1")
    if "up_a" in tensors:
        names = ("up_a", "down_a", "up_b", "down_b")
    up_a, down_a, up_b, down_b = (tensors[name].flatten(2) for name in names)
    factors = weights.float(), up_a.float(), down_a.float()
    changed = torch.einsum("noi...,nir,nrj->noj...", *factors).flatten(2)
    return changed.add_(multiply(up_b, down_b))


def _oft(tensors: Tensors, weights: Tensor) -> Tensor:
    """Turns blocks of outputs by Cayley transforms (Qiu et al. 2023), as AUTOMATIC1111 1.10.

    The limit of the blocks' norm is that of all blocks of a layer together (COFT).
    """
    turns = tensors.get("oft_diag")
    if turns is None:
        skew = tensors["oft_blocks"].float()
        skew = skew - skew.mT
        if (limit := tensors.get("limit")) is not None:
            norm = torch.linalg.vector_norm(skew, dim=(1, 2, 3), keepdim=True)
            limited = norm.minimum(limit.view(-1, 1, 1, 1))
            skew = skew * ((limited + 1e-8) / (norm + 1e-8))
        eye = torch.eye(skew.shape[-1], device=skew.device)
        # A skew matrix has no real eigenvalue but 0.
        inverse, _ = torch.linalg.inv_ex(eye - skew)
        turns = (eye + skew) @ inverse
    own = weights.float().flatten(2)
    blocks = own.view(*turns.shape[:3], -1)
    turned = torch.matmul(turns.float().mT, blocks).view_as(own)
    if (rescale := tensors.get("rescale")) is not None:
        turned *= rescale.float().reshape(len(own), -1, 1)
    return turned - own


def _turned(tensors: Tensors, weights: Tensor) -> Tensor:
    """Multiplies the inputs by a matrix and the outputs by numbers, as `adapters` reads them."""
    own = weights.float().flatten(2)
    turned = own @ tensors["turn"].float()
    turned *= tensors["turn_scale"].float()[..., None]
    if (added := tensors.get("diff")) is not None:
        turned += added.float().flatten(2)
    return turned - own


def kind_of(tensors: Tensors) -> str:
    return lora.kind_of(frozenset(tensors))[0]


#: The stacks of matrices of a change of each kind that does not depend on the weights: those of one
#: product, of two that are multiplied elementwise, of Kronecker's product, and the change itself.
MATRICES: Mapping[str, Callable[[Tensors], Sequence[Tensor]]] = {
    "lora": _lora_factors,
    "loha": lambda tensors: [
        factor for half in "12" for factor in _half_factors(tensors, "hada", half)
    ],
    "lokr": lambda tensors: [_half(tensors, "lokr", half) for half in "12"],
    "full": lambda tensors: [tensors["diff"]],
}

#: What computes a change of each kind, of the tensors and the weights.
_PRODUCTS: Mapping[str, Callable[[Tensors, Tensor], Tensor]] = {
    "lora": lambda tensors, _: multiply(*MATRICES["lora"](tensors)),
    "loha": lambda tensors, _: _hadamard(*MATRICES["loha"](tensors)),
    "lokr": lambda tensors, _: _kronecker(*MATRICES["lokr"](tensors)),
    "full": lambda tensors, _: tensors["diff"].to(torch.float32, copy=True),
    "ia3": lambda tensors, weights: (
        weights.flatten(2).float() * tensors["weight"].float()
    ),
    "glora": _glora,
    "oft": _oft,
    "turn": _turned,
}

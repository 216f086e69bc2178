"""Self-attention by the fastest kernel for its shape on this GPU.

SD1.5's heads are 40, 80 and 160 wide; those of 40 have 4096 tokens, most of the work. There the
kernels differ by up to a factor of two, depending on the GPU's generation and torch's version.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

log = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Runs of each kernel; the first ones also choose and load it.
_WARM_UP_RUNS, _TIMED_RUNS = 3, 10

#: Share of the largest value: a kernel further off the default one counts as broken.
_TOLERANCE = 0.02


def default(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        q, k, v, None, False
    )[0]
    return attended


def _cudnn_padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    width = q.shape[-1]
    padding = (0, -width % 64)
    q, k, v = (F.pad(each, padding) for each in (q, k, v))
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        q, k, v, None, False, scale=width**-0.5
    )[0]
    return attended[..., :width]


KERNELS: Mapping[str, Attend] = {
    "default": default,
    "cudnn": _cudnn,
    "cudnn_padded": _cudnn_padded,
}


class KernelSelector:
    """The fastest kernel for each shape, timed once; on a CPU the default one."""

    def __init__(self) -> None:
        self._fastest: dict[tuple[int, ...], Attend] = {}

    def select(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
        """The kernel for q, k, v [rows, heads, tokens, head width]; may overwrite them."""
        if q.device.type != "cuda":
            return default
        shape = tuple(q.shape)
        if shape not in self._fastest:
            self._fastest[shape] = self._find(q, k, v)
        return self._fastest[shape]

    def _find(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
        for tensor in (q, k, v):  # empty slots are all zero, which would hide a broken kernel
            tensor.normal_()
        milliseconds = {name: _time(kernel, q, k, v) for name, kernel in KERNELS.items()}
        name = min(milliseconds, key=milliseconds.__getitem__)
        log.info(
            "self-attention of %s by %s (milliseconds: %s)",
            "x".join(map(str, q.shape)),
            name,
            ", ".join(f"{each} {taken:.3f}" for each, taken in milliseconds.items()),
            extra={"action": "attention_chosen"},
        )
        return KERNELS[name]


def _time(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Milliseconds of the fastest run; infinite if the kernel rejects the shape or is wrong."""
    stream = torch.cuda.current_stream()
    try:
        attended = [attend(q, k, v) for _ in range(_WARM_UP_RUNS)][-1]
        expected = default(q, k, v)
        if (attended - expected).abs().max() > _TOLERANCE * expected.abs().max():
            return math.inf
        seconds = []
        for _ in range(_TIMED_RUNS):
            stream.synchronize()
            began_at = time.perf_counter()
            attend(q, k, v)
            stream.synchronize()
            seconds.append(time.perf_counter() - began_at)
    except (RuntimeError, NotImplementedError):
        stream.synchronize()  # raises if the GPU is broken, not just the kernel
        return math.inf
    # Not the mean: other processes may use the GPU as well.
    return min(seconds) * 1000

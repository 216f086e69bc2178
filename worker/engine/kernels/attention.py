"""Self-attention by the kernel that is fastest for its shape on this GPU.

SD1.5's heads are 40, 80 and 160 wide, and the widths of 40 have most of the work: 4096 tokens. The
kernels differ by a factor of up to two there, by generation of GPU and by version of torch.
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

#: Of the largest value: a kernel that is further off the default one is taken for broken.
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


class Chooser:
    """The fastest kernel for each shape, timed once; on a CPU the default one."""

    def __init__(self, kernel: str) -> None:
        """*kernel* is 'auto' or one of KERNELS."""
        self._kernel = kernel
        self._chosen: dict[tuple[int, ...], Attend] = {}

    def choose(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
        """The kernel for q, k, v [rows, heads, tokens, width of a head]; may overwrite them."""
        if q.device.type != "cuda":
            return default
        shape = tuple(q.shape)
        if shape not in self._chosen:
            self._chosen[shape] = self._find(q, k, v)
        return self._chosen[shape]

    def _find(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attend:
        for tensor in (q, k, v):  # an empty board's are all alike, which would prove nothing
            tensor.normal_()
        names = list(KERNELS) if self._kernel == "auto" else ["default", self._kernel]
        milliseconds = {name: _time(KERNELS[name], q, k, v) for name in names}
        if self._kernel == "auto":
            name = min(milliseconds, key=milliseconds.__getitem__)
        else:
            name = self._kernel if milliseconds[self._kernel] < math.inf else "default"
        log.info(
            "self-attention of %s by %s (milliseconds: %s)",
            "x".join(map(str, q.shape)),
            name,
            ", ".join(f"{each} {taken:.3f}" for each, taken in milliseconds.items()),
            extra={"action": "attention_chosen"},
        )
        return KERNELS[name]


def _time(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Milliseconds of a run; infinite where the kernel does not take the shape or errs in it."""
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
        stream.synchronize()  # raises where it is the GPU that is broken, not the kernel
        return math.inf
    # Not the mean: others may be at work on the GPU.
    return min(seconds) * 1000

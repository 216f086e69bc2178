"""Whether torch can use a node's GPU, before a model is loaded onto it."""

from __future__ import annotations

import torch

from imagefleet import errors

_SIDE = 256


def free_gpu_bytes(device: str) -> int:
    """The GPU's free memory, once it has calculated something right; *device* as in the settings.

    Raises:
        NodeError: there is no GPU, or it does not calculate.
    """
    if not torch.cuda.is_available():
        raise errors.NodeError("torch finds no CUDA GPU that it can use on this node")
    where = torch.device("cuda" if device == "auto" else device)
    try:
        ones = torch.ones(_SIDE, _SIDE, dtype=torch.float16, device=where)
        total = (ones @ ones).float().sum().item()
        free_bytes, _ = torch.cuda.mem_get_info(where)
    except RuntimeError as error:
        raise errors.NodeError(f"the GPU does not calculate: {str(error)[:300]}") from error
    if total != _SIDE**3:
        raise errors.NodeError(f"the GPU calculates wrong: {total:g} in place of {_SIDE**3}")
    return int(free_bytes)

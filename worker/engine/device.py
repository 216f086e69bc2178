"""The device that torch computes on: found, checked and set up."""

from __future__ import annotations

from typing import Literal

import torch

from imagefleet import errors

Precision = Literal["auto", "float16", "bfloat16", "float32"]

#: For torch's work on the CPU while a GPU draws (packing LoRAs, noise): several threads prepare
#: jobs, and with all cores for each they wait for each other.
_CPU_THREADS = 2

#: Side of the matrices whose product checks a GPU.
_CHECK_SIDE = 256


def find_device(name: str) -> torch.device:
    """The device for 'auto', 'cpu', 'cuda' or 'cuda:N'; a GPU's always has its number.

    Raises:
        SetupError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = f"{name!r} is not a device: use auto, cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise errors.SetupError(unknown) from error
    if device.type not in {"cpu", "cuda"}:
        raise errors.SetupError(unknown)
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise errors.SetupError(f"the device {name!r} does not exist; torch finds {gpus} CUDA GPUs")
    # Some of torch's functions accept a CUDA device only with its number.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def find_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The type of the weights; 'auto' is float16 on a GPU and float32 on a CPU."""
    if precision == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, precision)
    return dtype


def set_up(device: torch.device, *, fp16_accumulate: bool) -> None:
    """Sets torch's global options for an engine on *device*; nothing to do for a CPU."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)  # streams, events and graphs belong to the thread's own device
    # Shapes are few and stay the same, so it pays to time each convolution's kernels once.
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(min(torch.get_num_threads(), _CPU_THREADS))
    if fp16_accumulate:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True


def free_gpu_bytes(name: str) -> int:
    """The GPU's free memory, after a matrix product on it came out right; *name* as in settings.

    Raises:
        NodeError: there is no GPU, or it fails or miscalculates.
    """
    if not torch.cuda.is_available():
        raise errors.NodeError("torch finds no CUDA GPU it can use on this node")
    device = torch.device("cuda" if name == "auto" else name)
    try:
        ones = torch.ones(_CHECK_SIDE, _CHECK_SIDE, dtype=torch.float16, device=device)
        total = (ones @ ones).float().sum().item()
        free_bytes, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise errors.NodeError(f"the GPU fails a matrix product: {str(error)[:300]}") from error
    if total != _CHECK_SIDE**3:
        raise errors.NodeError(f"the GPU miscalculates: {total:g} instead of {_CHECK_SIDE**3}")
    return int(free_bytes)

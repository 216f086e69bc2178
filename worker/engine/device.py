"""The device that torch computes on: found, checked and set up."""

import os
import re
import sys
from typing import Literal

import torch

from imagefleet import concurrency
from imagefleet.errors import NodeError, SetupError
from worker.engine.files import safetensors

Precision = Literal["auto", "float16", "bfloat16", "float32", "int8"]

#: Threads of torch's work on the CPU while a GPU draws (packing LoRAs, noise): several threads
#: prepare jobs, and with all cores for each they wait for each other.
_CPU_THREADS = 2

#: Threads that encode prompts on the CPU: a share of its cores, up to so many. With two threads one
#: of SDXL's takes almost a second.
_TEXT_SHARE = 1 / 2
_MAX_TEXT_THREADS = 8

#: The thread that feeds the GPU asks for Python's lock hundreds of times in each tick. By default,
#: those that prepare jobs or compile may keep it for 5 ms at a time.
_SWITCH_SECONDS = 0.0001

#: Memory in segments that grow, of which less is lost to fragments: with SDXL on 8 GB, a GiB.
_ALLOCATOR = "expandable_segments:True"

#: The compute capability of the first GPUs with bfloat16, Ampere's.
_BFLOAT16_SINCE = (8, 0)

#: Side of the matrices whose product checks a GPU.
_CHECK_SIDE = 256


def find_device(name: str) -> torch.device:
    """The device for 'auto', 'cpu', 'cuda' or 'cuda:N'; a GPU's always has its number.

    Raises SetupError if there is no such device, or NVIDIA's driver is too old for torch.
    """
    if name != "cpu" and (problem := _driver_problem()):
        raise SetupError(
            f"{problem}\nUpdate the driver, or use a torch for an older CUDA version (in the image:"
            " the build argument CUDA), or the CPU (--device cpu)"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise SetupError(f"{name!r} is not a device: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    gpus = torch.cuda.device_count()
    if (device.index or 0) >= gpus:
        raise SetupError(
            f"the device {name!r} does not exist; torch finds {gpus} CUDA GPUs"
        )
    # The allocator is set up before its first memory; users' own settings stay.
    until_torch_2_9 = "PYTORCH_CUDA_ALLOC_CONF"
    since = "PYTORCH_ALLOC_CONF"
    if until_torch_2_9 not in os.environ and since not in os.environ:
        os.environ[since if torch.__version__ >= "2.9" else until_torch_2_9] = (
            _ALLOCATOR
        )
    # Some of torch's functions accept a CUDA device only with its number.
    return torch.device("cuda", device.index or 0)


def find_dtype(
    precision: Precision, device: torch.device, on_gpu: Precision = "float16"
) -> torch.dtype:
    """The type of the weights; 'auto' is *on_gpu* on a GPU and float32 on a CPU.

    Raises SetupError for int8, and for bfloat16 on a GPU that has none.
    """
    if precision == "int8":
        raise SetupError("--precision int8 is for FLUX.2-klein alone")
    usual = on_gpu if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, usual if precision == "auto" else precision)
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < _BFLOAT16_SINCE
    ):
        raise SetupError(
            "this GPU does not compute in bfloat16: use one of the RTX 30 series or newer, or"
            " --precision float32"
        )
    return dtype


def set_up(
    device: torch.device, *, fp16_accumulate: bool, has_text_on_cpu: bool = False
) -> None:
    """Sets global options for an engine on *device*; nothing to do for a CPU."""
    if device.type != "cuda":
        return
    # Streams, events and graphs belong to the thread's own device.
    torch.cuda.set_device(device)
    threads = _CPU_THREADS
    cores = concurrency.cores()
    if has_text_on_cpu:
        threads = max(threads, min(_MAX_TEXT_THREADS, int(_TEXT_SHARE * cores)))
    torch.set_num_threads(min(cores, threads))
    sys.setswitchinterval(_SWITCH_SECONDS)
    safetensors.packs.locks_pages = safetensors.layers.locks_pages = True
    if fp16_accumulate:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True


def free_gpu_bytes(name: str) -> int:
    """The GPU's free memory, after a matrix product on it came out right; *name* as in settings.

    Raises NodeError if there is no GPU, its driver is too old, or it fails or miscalculates.
    """
    if problem := _driver_problem():
        raise NodeError(problem)
    if not torch.cuda.is_available():
        raise NodeError("torch finds no CUDA GPU it can use on this node")
    device = torch.device("cuda" if name == "auto" else name)
    try:
        ones = torch.ones(_CHECK_SIDE, _CHECK_SIDE, dtype=torch.float16, device=device)
        total = (ones @ ones).float().sum().item()
        free_bytes, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise NodeError(
            f"the GPU fails a matrix product: {str(error)[:300]}"
        ) from error
    if total != _CHECK_SIDE**3:
        raise NodeError(f"the GPU miscalculates: {total:g} instead of {_CHECK_SIDE**3}")
    return int(free_bytes)


def check_listed_gpu() -> None:
    """Raises as `free_gpu_bytes` if torch cannot open a GPU that the driver lists: it is broken.

    An old driver and a torch without CUDA are left to `find_device`: they are for the operator.
    """
    if torch.version.cuda and not _driver_problem():
        free_gpu_bytes("cuda")


def _driver_problem() -> str | None:
    """Torch's words on a driver that is too old for it; None if it is not, or without any."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        if "too old" in str(error):
            return f"torch for CUDA {torch.version.cuda}: {error}"
    return None

"""The one way into this room for the worker's process; torch is imported only when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from imagefleet import errors
from worker.engine import contract
from worker.engine.slots import mode

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "float16", "bfloat16", "float32"]
Kind = Literal["slots", "batch"]
Compile = Literal["auto", "off"]
Attention = Literal["auto", "default", "cudnn", "cudnn_padded"]

#: For what torch does on the CPU while a GPU draws: packing LoRAs, noise.
_CPU_THREADS_BESIDE_GPU = 2


def load_engine(
    model: Path,
    device: str = "auto",
    max_batch: int = 8,
    *,
    precision: Precision = "auto",
    config: Path | None = None,
    lora_cache_bytes: int = 2 * 1024**3,
    kind: Kind = "slots",
    slots: int | None = None,
    compile: Compile = "auto",  # noqa: A002 - what it is called everywhere
    compiled_ways: Sequence[mode.WeightMode] = mode.ALL,
    rank_capacity: int = 64,
    fp16_accumulate: bool = False,
    attention: Attention = "auto",
) -> contract.Engine:
    """Loads a checkpoint (a diffusers folder or one `.safetensors` file) and the engine on it.

    *device* is 'auto', 'cpu', 'cuda' or 'cuda:N'; *precision* 'auto' is float16 on a GPU and
    float32 on a CPU. LoRA files are kept in memory up to *lora_cache_bytes*. A single file takes
    its tokenizer (and configuration, where it is not SD1.5's) from the folder *config*, by default
    the one of its own name beside it, or its own. No network is touched. The same seed gives the
    same bytes on the same hardware only, and on a CPU with the same number of threads only.

    *kind* 'slots' draws *slots* images at once, each at its own step; None takes as many as the
    GPU's memory holds. 'batch' draws *max_batch* at most, which start and end together.

    *compile* 'auto' compiles on a GPU, which takes a minute or two here; the UNet in the
    *compiled_ways*, for those who need but one, or another order. LoRAs of a rank over
    *rank_capacity* are merged into the weights, so share calls with their like only.
    *fp16_accumulate* doubles GeForce cards' rate of matrix products at some loss of accuracy.

    Raises:
        SetupError: a library, the device or a part of the checkpoint is missing or does not fit.
    """
    try:
        from worker.engine import batch_engine, checkpoint
        from worker.engine.slots import engine as slot_engine
    except ModuleNotFoundError as error:
        raise errors.SetupError(
            f"the worker needs {error.name}, which is not installed: pip install imagefleet[worker]"
        ) from error
    torch_device = find_device(device)
    dtype = find_dtype(precision, torch_device)
    loaded = checkpoint.load_checkpoint(model, torch_device, dtype, config)
    if torch_device.type == "cuda":
        _set_up_cuda(torch_device, fp16_accumulate=fp16_accumulate)
    if kind == "batch":
        return batch_engine.BatchEngine(loaded, max_batch, lora_cache_bytes)
    engine = slot_engine.SlotEngine(
        loaded,
        slots,
        lora_cache_bytes=lora_cache_bytes,
        rank_capacity=rank_capacity,
        backend="inductor" if compile == "auto" and torch_device.type == "cuda" else None,
        compiled_ways=compiled_ways,
        attention_kernel=attention,
    )
    if torch_device.type == "cuda":
        engine.warm_up(*engine.default_size)
    return engine


def _set_up_cuda(device: torch.device, *, fp16_accumulate: bool) -> None:
    import torch

    torch.cuda.set_device(device)  # streams, events and graphs are of the thread's own device
    # Shapes are few and stay the same, so it pays to time each convolution's kernels once.
    torch.backends.cudnn.benchmark = True
    # Several threads prepare jobs side by side; with all cores for each, they wait for each other.
    torch.set_num_threads(min(torch.get_num_threads(), _CPU_THREADS_BESIDE_GPU))
    if fp16_accumulate:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True


def find_device(name: str) -> torch.device:
    """The device of a name, a GPU's with its number; raises SetupError where there is none."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise errors.SetupError(f"{name!r} is no device: auto, cpu, cuda or cuda:N") from error
    if device.type not in {"cpu", "cuda"}:
        raise errors.SetupError(f"{name!r} is no device: auto, cpu, cuda or cuda:N")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise errors.SetupError(f"the device {name!r} does not exist; torch sees {gpus} CUDA GPUs")
    # Some of torch's functions take a device of CUDA's by its number only.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def find_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What the weights are kept in."""
    import torch

    if precision == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtypes = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
    }
    return dtypes[precision]

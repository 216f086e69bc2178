"""The one way into this room for the worker's process; torch is imported only when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jobs import errors
from worker.engine import contract

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "float16", "bfloat16", "float32"]


def load_engine(
    model: Path,
    device: str = "auto",
    max_batch: int = 8,
    *,
    precision: Precision = "auto",
    config: Path | None = None,
    lora_cache_bytes: int = 2 * 1024**3,
) -> contract.Engine:
    """Loads a checkpoint (a diffusers folder or one `.safetensors` file) and the engine on it.

    *device* is 'auto', 'cpu', 'cuda' or 'cuda:N'; *precision* 'auto' is float16 on a GPU and
    float32 on a CPU. LoRA files are kept in memory up to *lora_cache_bytes*. A single file takes
    its tokenizer (and configuration, where it is not SD1.5's) from the folder *config*, by default
    the one of its own name beside it, or its own. No network is touched. The same seed gives the
    same bytes on the same hardware only, and on a CPU with the same number of threads only.

    Raises:
        SetupError: a library, the device or a part of the checkpoint is missing or does not fit.
    """
    try:
        from worker.engine import batch_engine, checkpoint
    except ModuleNotFoundError as error:
        raise errors.SetupError(
            f"the worker needs {error.name}, which is not installed: pip install imagefleet[worker]"
        ) from error
    torch_device = _find_device(device)
    dtype = _find_dtype(precision, torch_device)
    loaded = checkpoint.load_checkpoint(model, torch_device, dtype, config)
    return batch_engine.BatchEngine(loaded, max_batch, lora_cache_bytes)


def _find_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise errors.SetupError(f"{name!r} is no device: auto, cpu, cuda or cuda:N") from error
    if device.type not in {"cpu", "cuda"}:
        raise errors.SetupError(f"{name!r} is no device: auto, cpu, cuda or cuda:N")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise errors.SetupError(f"the device {name!r} does not exist; torch sees {gpus} CUDA GPUs")
    return device


def _find_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    import torch

    if precision == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtypes = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
    }
    return dtypes[precision]

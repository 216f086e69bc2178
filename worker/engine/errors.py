"""What an exception out of torch means for the job and for the machine."""

from __future__ import annotations

import torch

from imagefleet import errors

#: CUDA's own errors poison the process: after one of them, every later call fails as well.
_STICKY = ("CUDA error", "device-side assert", "illegal memory access", "ECC error")

#: Memory that ran out outside torch's allocator: reported as a CUDA error, but it passes.
_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller batch would help."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MEMORY)
    )


def classify(error: Exception) -> errors.FleetError:
    """The error that stands for an image that failed with *error*.

    Raises:
        NodeError: the GPU itself is broken.
    """
    if isinstance(error, errors.NodeError):
        raise error
    if isinstance(error, errors.FleetError):
        return error
    cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
    if is_out_of_memory(error):
        return errors.TransientError(f"the GPU's memory does not hold this image: {cause}")
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _STICKY):
        raise errors.NodeError(f"the GPU is broken: {cause}") from error
    return errors.TransientError(f"the image could not be generated: {cause}")


def empty_cache(device: torch.device) -> None:
    """Hands the memory that torch keeps for later back to the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

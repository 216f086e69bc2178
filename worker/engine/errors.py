"""Maps exceptions from torch to the error tree: at fault is the job or the machine."""

import torch

from imagefleet.errors import FleetError, NodeError, TransientError

#: CUDA errors after which every later call in the process fails as well.
_STICKY = ("CUDA error", "device-side assert", "illegal memory access", "ECC error")

#: Out of memory outside torch's allocator: reported as a CUDA error, but recoverable.
_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """True if a smaller batch may succeed."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MEMORY)
    )


def classify(error: Exception) -> FleetError:
    """The outcome of an image that failed with *error*; raises NodeError if the GPU is broken."""
    if isinstance(error, NodeError):
        raise error
    if isinstance(error, FleetError):
        return error
    cause = f"{type(error).__name__}: {str(error).strip()[:300]}"
    if is_out_of_memory(error):
        return TransientError(f"the GPU ran out of memory for this image: {cause}")
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _STICKY):
        raise NodeError(f"the GPU is broken: {cause}") from error
    return TransientError(f"the image could not be generated: {cause}")

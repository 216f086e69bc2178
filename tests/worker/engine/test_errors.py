import pytest
import torch

from imagefleet import errors
from worker.engine import errors as engine_errors


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
    ],
)
def test_out_of_memory_is_transient(error: RuntimeError):
    assert engine_errors.is_out_of_memory(error)
    assert isinstance(engine_errors.classify(error), errors.TransientError)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
    ],
)
def test_sticky_cuda_errors_are_node_errors(message: str):
    assert not engine_errors.is_out_of_memory(RuntimeError(message))
    with pytest.raises(errors.NodeError, match="the GPU is broken"):
        engine_errors.classify(RuntimeError(message))


def test_a_fleet_error_is_unchanged():
    refusal = errors.UnusableFileError("no LoRA")
    assert engine_errors.classify(refusal) is refusal
    with pytest.raises(errors.NodeError):
        engine_errors.classify(errors.NodeError("gone"))


def test_any_other_error_is_transient_and_names_its_cause():
    outcome = engine_errors.classify(ValueError("mismatched sizes"))
    assert isinstance(outcome, errors.TransientError)
    assert "ValueError: mismatched sizes" in outcome.message

"""The machine that a measurement runs on."""

from __future__ import annotations

import platform
import resource
from importlib import metadata

import torch

_LIBRARIES = ("imagefleet", "torch", "diffusers", "transformers", "peft", "triton")


def hardware(device: torch.device) -> dict[str, str | int]:
    """The device's name and memory in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "memory_bytes": properties.total_memory}
    return {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Of Python, CUDA and the libraries that affect speed."""
    found = {"python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue  # a checkout is not a distribution, and a CPU has no Triton
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """GPU memory since `reset_peak`; on a CPU, the whole process' since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

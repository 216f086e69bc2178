"""The machine that a measurement runs on, and its limit: the rate of its matrix products."""

import gc
import itertools
import platform
import resource
import statistics
import timeit
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from imagefleet.pricing import families
from worker.engine import checkpoint, text
from worker.engine.families import reading, table
from worker.engine.families.table import SD1
from worker.engine.flow import checkpoint as flows

_LIBRARIES = ("imagefleet", "torch", "diffusers", "transformers", "peft", "triton")

#: Side of the square matrices, and the number of products, for warm-up and for timing: enough for
#: a GPU to be saturated and to fall to its sustained clock, in a second.
_SIDES = {"cuda": 8192, "cpu": 1024}
_REPEATS = {"cuda": 200, "cpu": 10}


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
    """Versions of Python, CUDA and the libraries that affect speed."""
    found = {"python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue  # a checkout is not a distribution, and a CPU has no Triton
    return found


def free_memory(device: torch.device) -> None:
    """Gives back the GPU memory of what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """GPU memory since `reset_peak`; on a CPU, the whole process' since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations/s of large matrix products, the median.

    On random numbers: on zeros a GPU draws less power and runs faster than on any real data.
    """
    side = _SIDES[device.type]
    repeats = _REPEATS[device.type]
    one, other = (
        torch.randn((side, side), device=device, dtype=dtype) for _ in range(2)
    )
    multiply = partial(torch.matmul, one, other, out=torch.empty_like(one))
    for _ in range(repeats):
        multiply()
    if device.type == "cuda":
        seconds = _time_on_gpu(multiply, repeats)
    else:
        seconds = timeit.repeat(multiply, number=1, repeat=repeats)
    return 2 * side**3 / statistics.median(seconds)


def count_image_flops(model: Path, width: int, height: int, unet_calls: int) -> float:
    """Operations of one image with guidance: cond and uncond UNet calls, text encoding, decoding.

    Counted on the meta device for prompts of one chunk. *model* is a diffusers folder; anything
    else counts as SD1.5. Those of flows are as counted for their published networks.
    """
    if (flow := flows.family_of(model)) is not None:
        return 1e12 * families.find(flow.slug).image_tflop(width, height, unet_calls)
    unet_config = reading.network_config(model / "unet", SD1.unet_config)
    family = table.of_folder(
        unet_config, reading.network_config(model / "text_encoder", {})
    )
    networks = {}
    for name, (kind, config) in checkpoint.parts_of(family).items():
        own = reading.network_config(model / name, config)
        networks[name] = reading.build(kind, own)
    unet = networks["unet"]
    vae = networks["vae"]
    text_encoders = [networks[name] for name in family.networks]
    with torch.device("meta"):
        factor = checkpoint.vae_factor(vae)
        latent = torch.empty(
            1, unet.config.in_channels, height // factor, width // factor
        )
        ids = torch.zeros((1, text.CONTEXT_TOKENS), dtype=torch.long)
        context = torch.empty(1, text.CONTEXT_TOKENS, unet.config.cross_attention_dim)
        added = None
        if family.has_size_ids:
            pooled = torch.empty(1, text_encoders[-1].config.projection_dim)
            added = {"text_embeds": pooled, "time_ids": torch.empty(1, 6)}
        unet_flops = _count(
            lambda: unet(latent, torch.empty(1), context, added_cond_kwargs=added)
        )
        text_flops = sum(_count(partial(each, ids)) for each in text_encoders)
        vae_flops = _count(lambda: vae.decode(latent[:, : unet.config.out_channels]))
    return 2 * unet_calls * unet_flops + 2 * text_flops + vae_flops


def _count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return int(counter.get_total_flops())


def _time_on_gpu(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds per call, by CUDA events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [
        before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)
    ]

"""The origin of an image's noise: AUTOMATIC1111's generators and its variations of a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["CPU", "GPU", "NV"]
"""AUTOMATIC1111's `randn_source`: torch's generator on the CPU, its generator on an NVIDIA GPU, or
the same computed on the CPU. Here the last two are the same: no noise depends on the machine."""

#: Seeds of the Philox generator, which has keys of 64 bits, do not wrap at 32 bits as torch's do.
PHILOX: frozenset[Source] = frozenset({"GPU", "NV"})


@dataclass(frozen=True, slots=True)
class Noise:
    """How an image's noise follows from its seed."""

    source: Source = "CPU"
    seed_delta: int = 0
    """`eta_noise_seed_delta`: added to the seed for all noise but the first."""
    subseed: int = 0
    subseed_strength: float = 0.0
    """How far the first noise is turned towards that of the subseed."""
    resize_from: tuple[int, int] | None = None
    """(width, height) in pixels of the image whose first noise is put into the middle of it."""


#: The noise of all jobs that do not say otherwise.
DEFAULT = Noise()

"""The noise of a job's images: its generator, and how it follows from the job's seeds. No torch."""

from dataclasses import dataclass
from typing import Literal

from imagefleet.job.sizes import Size

#: AUTOMATIC1111's `randn_source`: torch's generator on the CPU, its generator on an NVIDIA GPU, or
#: the same computed on the CPU. Here the last two are the same: no noise depends on the machine.
NoiseSource = Literal["CPU", "GPU", "NV"]

#: AUTOMATIC1111's seeds have up to 64 bits; tables of results, for which this is the limit, a sign.
MAX_SEED = 2**63 - 1

#: Sources whose generator is Philox, with keys of 64 bits. torch's on the CPU takes the lower 32
#: bits of a seed, but for Brownian motion all.
PHILOX: frozenset[NoiseSource] = frozenset({"GPU", "NV"})


@dataclass(frozen=True, slots=True)
class Noise:
    """Options of an image's noise, which follows from its seed."""

    source: NoiseSource = "CPU"
    #: `eta_noise_seed_delta`: added to the seed for all noise but the first.
    seed_delta: int = 0
    subseed: int = 0
    #: Share by which the first noise is turned towards that of the subseed.
    subseed_strength: float = 0.0
    #: (width, height) in pixels of the image whose first noise is put into the middle of it.
    resize_from: Size | None = None


DEFAULT_NOISE = Noise()

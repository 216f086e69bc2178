"""The limits that a node must meet to be kept.

On SaladCloud nodes are other people's computers, and of 829 measured ones a quarter were clearly
slower than their GPU's mean (SaladTechnologies/sd1.5-performance). But each node that is given up
is kept from the whole group for 48 hours, so the limits are for broken nodes, not for slow ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagefleet.pricing import prices
from worker.settings import WorkerSettings

#: A card's speed here as a share of its record in `pricing/gpus.toml`, which had the best software
#: and host. Means over SaladCloud's nodes were 0.53 of it (RTX 4090), 0.62 (3060 Ti), 0.74
#: (3080) and 0.87 (3070): 15 steps at batch 4 in SaladTechnologies/sd1.5-performance.
SHARE_OF_RECORD = 0.5

#: Below this share of the expected speed a node is broken: SaladCloud's own advice.
BROKEN_SHARE = 0.25

#: For a class without a record: a quarter of the slowest one's is very little.
_SLOWEST = min(prices.ASSUMED_IMAGES_PER_SECOND.values())

#: On SaladCloud a tenth of the nodes upload at less than 39 Mbit/s, and a fast card's PNGs
#: (2 images/s of 400 KB) take 6. Elsewhere uploads are not checked.
MIN_UPLOAD_MEGABITS = 2.0

#: SaladCloud allowed 300 s in its largest test; a slow disk and compiling take longer.
START_UP_SECONDS = 1200.0

#: SD1.5 in float16 with room for a small batch; a desktop may hold some of a 6 GB card.
FREE_GPU_BYTES = 3 * 2**30

#: Room for LoRAs, compiled kernels and logs.
FREE_DISK_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """0: not checked; images are of 512x512 and 15 steps."""

    images_per_second: float = 0.0
    upload_bits_per_second: float = 0.0
    start_up_seconds: float = 0.0
    free_gpu_bytes: int = 0
    free_disk_bytes: int = 0


#: For a machine that is not rented by the hour.
NO_LIMITS = NodeLimits()


def limits_of(settings: WorkerSettings, gpu: str, *, on_salad: bool) -> NodeLimits:
    """The settings' limits; without them the defaults on SaladCloud, and none elsewhere."""

    def limit(given: float | None, by_default: float) -> float:
        if given is not None:
            return given
        return by_default if on_salad else 0.0

    return NodeLimits(
        images_per_second=limit(settings.min_images_per_second, broken_below(gpu)),
        upload_bits_per_second=1e6 * MIN_UPLOAD_MEGABITS if on_salad else 0.0,
        start_up_seconds=limit(settings.start_up_seconds, START_UP_SECONDS),
        free_gpu_bytes=FREE_GPU_BYTES if on_salad else 0,
        free_disk_bytes=FREE_DISK_BYTES if on_salad else 0,
    )


def broken_below(gpu: str) -> float:
    """Images/s below which a card of this class is broken; 0 for anything but an RTX card."""
    if not gpu.startswith("RTX "):
        return 0.0
    record = prices.ASSUMED_IMAGES_PER_SECOND.get(gpu, _SLOWEST)
    return BROKEN_SHARE * SHARE_OF_RECORD * record


def standard_images(steps: int, width: int, height: int) -> float:
    """How many images of 15 steps at 512x512 an image is worth.

    Its decoding and its text cost as much as 1.6 of SD1.5's steps (2.52 of 1.606 TFLOP).
    """
    return (steps + 1.57) / (15 + 1.57) * (width * height) / (512 * 512)

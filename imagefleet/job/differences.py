"""Warnings that a picture may differ from AUTOMATIC1111's; docs/a1111.md lists all differences.

A worker says so in its log, once for each.
"""

import functools
from collections.abc import Mapping

from imagefleet.telemetry import logs

log = logs.EventLog(__name__)

KNOWN: Mapping[str, str] = {
    "control_size": "a ControlNet's image of another size than the drawing's is resized with"
    " Pillow, where sd-webui-controlnet uses OpenCV and thins lines again: give it in that size",
    "gpu_noise": "with randn_source GPU, a small GPU draws the noise of more than some 700,000"
    " pixels in another order than a large one, whose order is taken here, as by NV",
    "dotted_lora": "LoRAs in the names of diffusers or peft are drawn; there they change nothing",
    "mixed_loras": "a DoRA, IA3, GLoRA or OFT beside other LoRAs changes the checkpoint's weights;"
    " there what the LoRAs before it made of them",
}

#: Pixels beyond which the noise of a small GPU has another order than that of a large one.
GPU_NOISE_PIXELS = 700_000


@functools.cache
def warn(difference: str) -> None:
    """Logs one of `KNOWN`, once in a process."""
    log.warning(
        f"an image may differ from AUTOMATIC1111's: {KNOWN[difference]}",
        action="differs_from_a1111",
        difference=difference,
    )

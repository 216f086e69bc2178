"""How many images/s a GPU class should make: what plans and the checks of nodes rest on."""

from __future__ import annotations

from collections.abc import Mapping

SPEEDS_SOURCE = (
    "the best SD1.5 record of the card in SD.Next's public benchmark logs of 2025"
    " (vladmandic/sd-data), scaled to 512x512, 15 steps with guidance; not measured with imagefleet"
)

#: Images/s of one card. Records are iterations a second at 20 steps; an image of 15 steps
#: with its decoding costs 26.64 of the 34.67 TFLOP of one of 20, so images = iterations / 15.37.
ASSUMED_IMAGES_PER_SECOND: Mapping[str, float] = {
    "RTX 3060 8GB": 0.60,
    "RTX 3060 12GB": 0.60,
    "RTX 3060 Ti 8GB": 0.83,
    "RTX 3070 8GB": 0.82,
    "RTX 3080 10GB": 1.27,
    "RTX 3090 24GB": 1.63,
    "RTX 4060 Ti 16GB": 0.93,
    "RTX 4070 12GB": 1.25,
    "RTX 4070 Ti Super 16GB": 1.91,
    "RTX 4080 16GB": 1.74,
    "RTX 4090 24GB": 3.75,
    "RTX 5070 12GB": 1.20,
    "RTX 5070 Ti 16GB": 1.60,
    "RTX 5080 16GB": 2.09,
    "RTX 5090 32GB": 4.52,
}

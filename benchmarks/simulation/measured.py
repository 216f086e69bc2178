"""Speeds of consumer cards by this engine's share of a card's limit, measured on an H200."""

import json
from pathlib import Path

from imagefleet.pricing import families

#: TFLOP/s of fp16 products with fp32 accumulation, of classes with a record in `gpus.toml`
#: (NVIDIA's whitepapers; the others by twice the rate of fp32 outside tensor cores).
TFLOP_PER_SECOND = {
    "RTX 3060 8GB": 25.5,
    "RTX 3060 12GB": 25.5,
    "RTX 3060 Ti 8GB": 32.4,
    "RTX 3070 8GB": 40.6,
    "RTX 3080 10GB": 59.5,
    "RTX 3090 24GB": 71.0,
    "RTX 4060 Ti 16GB": 44.1,
    "RTX 4070 12GB": 58.3,
    "RTX 4080 16GB": 97.5,
    "RTX 4090 24GB": 165.2,
}

#: Results of `benchmarks/engine.py`.
ENGINE = Path(__file__).parent.parent / "results" / "engine-h200.json"


def images_per_second(name: str) -> float:
    """Images/s of a class that draws SD1.5's images of 15 steps at the measured share."""
    share = json.loads(ENGINE.read_text(encoding="utf-8"))["matrix_limit_fraction"]
    return float(share) * TFLOP_PER_SECOND[name] / families.SD1.image_tflop()

"""What was measured of this engine, for `--measured`: of one machine, or as a share of a limit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefleet import errors
from imagefleet.pricing import families, prices
from simulation.nodes import Card

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

_RESULTS = Path(__file__).parent.parent / "results"

#: Of `benchmarks/engine.py`, on an H200.
ENGINE = _RESULTS / "engine-h200.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one file."""

    rows: Sequence[dict[str, Any]] = ()
    """`workers`, `images_per_second` and `linear_fraction` of workers that ran together."""
    limit_fraction: float | None = None
    """The share of a card's fp16 rate that the engine makes images with."""

    def cards(self, names: Sequence[str], priority: prices.Priority) -> list[Card]:
        """What is simulated: the measured machine, or each class at that share of its limit.

        Raises:
            SetupError: the limit of a class is not known.
        """
        if self.limit_fraction is None:
            return [Card("measured", self.rows[0]["images_per_second"], 0.0)]
        return [
            Card(
                name,
                images_per_second(name, self.limit_fraction),
                prices.gpu_dollars_per_hour(name, priority),
            )
            for name in names
        ]


def read(file: Path) -> Measured:
    """Reads the results of `benchmarks/gpus.py` or `engine.py`.

    Raises:
        SetupError: the file has none of them.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if "matrix_limit_fraction" in found:
            return Measured(limit_fraction=float(found["matrix_limit_fraction"]))
        return Measured(_by_count(found["images_per_second_by_count"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.SetupError(
            f"{file} is not what benchmarks/gpus.py or benchmarks/engine.py writes: {error}"
        ) from None


def _by_count(rates: dict[str, float]) -> list[dict[str, Any]]:
    counts = sorted(rates, key=int)
    one = rates[counts[0]] / int(counts[0])
    return [
        {
            "workers": int(count),
            "images_per_second": rates[count],
            "linear_fraction": rates[count] / (int(count) * one),
        }
        for count in counts
    ]


def images_per_second(name: str, limit_fraction: float) -> float:
    """Of a class that draws SD1.5's images of 15 steps at a share of its fp16 rate.

    Raises:
        SetupError: that rate is not known.
    """
    if name not in TFLOP_PER_SECOND:
        raise errors.SetupError(
            f"the fp16 rate of {name!r} is not known, only of: {', '.join(TFLOP_PER_SECOND)}"
        )
    return limit_fraction * TFLOP_PER_SECOND[name] / families.SD1.image_tflop()

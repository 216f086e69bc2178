"""Which is cheaper for what the slots hold: each its own weights, or the same merged for all."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

WeightMode = Literal["slots", "merged"]
"""Each slot's own weights, or one set for all: some LoRAs merged, or the checkpoint's own."""

ALL: tuple[WeightMode, ...] = get_args(WeightMode)

LoraKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a tick in either way, and of merging LoRAs into the shared weights.

    The defaults are guesses that hold until something is timed; on a CPU, so for good.
    """

    slots_tick: float = 0.105
    merged_tick: float = 0.1
    merge: float = 0.02


def choose(
    keys: Collection[LoraKey], merged: LoraKey | None, ticks: int, costs: Costs
) -> tuple[WeightMode, LoraKey]:
    """The way for slots that want *keys*, and what is to be merged for it.

    *merged* is what the shared weights hold now, None if that is unknown; *ticks*, for how long
    the slots may stay like that.
    """
    if len(set(keys)) != 1:
        return "slots", ()
    (key,) = set(keys)
    if key in (merged, ()):
        return "merged", key
    gain = ticks * (costs.slots_tick - costs.merged_tick)
    return ("merged", key) if gain > costs.merge else ("slots", ())


def ticks_alike(remaining: Sequence[int], waiting: Sequence[int], slots: int) -> int:
    """Ticks for which slots stay alike whose images need *remaining*, *waiting* behind them."""
    return max(remaining, default=0) + math.ceil(sum(waiting) / slots)

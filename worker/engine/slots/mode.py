"""The cheaper weight mode for the jobs in the slots: each its own weights, or one shared set."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

WeightMode = Literal["per_slot", "shared"]
"""Each slot its own weights, or one set for all: the checkpoint's own, or with LoRAs merged in."""

ALL: tuple[WeightMode, ...] = get_args(WeightMode)

LoraKey = tuple[object, ...]
"""What identifies the LoRAs merged into some weights, with their strengths; () for none."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a tick in each mode, and of merging LoRAs into the shared weights.

    The defaults are guesses until a GPU is timed; a CPU never is.
    """

    per_slot_seconds: float = 0.105
    shared_seconds: float = 0.1
    merge_seconds: float = 0.02


def choose(
    keys: Collection[LoraKey], merged: LoraKey | None, ticks: int, costs: Costs
) -> tuple[WeightMode, LoraKey]:
    """The mode for slots with the LoRAs *keys*, and what the shared weights must hold for it.

    *merged* is what the shared weights hold now, None if unknown; *ticks* is for how long the slots
    are expected to keep these LoRAs.
    """
    if len(set(keys)) != 1:
        return "per_slot", ()
    (key,) = set(keys)
    if key in (merged, ()):
        return "shared", key
    saved_seconds = ticks * (costs.per_slot_seconds - costs.shared_seconds)
    return ("shared", key) if saved_seconds > costs.merge_seconds else ("per_slot", ())


def ticks_until_change(remaining: Sequence[int], waiting: Sequence[int], slots: int) -> int:
    """Ticks until the LoRAs change: UNet calls *remaining* in the slots, and of jobs *waiting*."""
    return max(remaining, default=0) + math.ceil(sum(waiting) / slots)

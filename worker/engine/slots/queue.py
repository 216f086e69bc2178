"""Jobs waiting for a slot: which of them may share a call, which is next, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

from worker.engine.lora.merge import LoraKey
from worker.engine.slots.linear import Factors, Group
from worker.engine.slots.prepare import PLAIN_TOKENS, PreparedRequest

WeightMode = Literal["per_slot", "shared"]
"""Each slot its own weights, or one set for all: the checkpoint's own, or with LoRAs merged in."""

WEIGHT_MODES: tuple[WeightMode, ...] = get_args(WeightMode)


class BatchKey(NamedTuple):
    """What jobs must have in common to share calls; the slots hold jobs of one key at a time."""

    width: int
    height: int
    tokens: int
    merged_loras: LoraKey | None
    """The LoRAs that must be merged into the shared weights; None if slots can hold them."""
    isolated: int | None
    """The ticket of a job that runs alone, since it may be what breaks the calls of others."""

    @property
    def is_masked(self) -> bool:
        """True if prompts may be shorter than the context."""
        return self.tokens != PLAIN_TOKENS


@dataclass(frozen=True, slots=True)
class Staged:
    """A job's data on the device, ready to be copied into a slot."""

    latents: torch.Tensor
    """[4, height, width]"""
    vectors: torch.Tensor
    """[2, tokens, width]: of the prompt and the negative prompt, padded with zeros."""
    mask: torch.Tensor | None
    """[2, 1, 1, tokens], added to the attention scores; None for an unmasked batch key."""
    flat: torch.Tensor | None
    """The LoRAs, of which `factors` are views."""
    factors: dict[Group, Factors]
    generator: torch.Generator

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is on the device."""
        held = (self.latents, self.vectors, self.mask, self.flat)
        return [tensor for tensor in held if tensor is not None]


@dataclass(slots=True, eq=False)
class SlotJob:
    """One admitted request."""

    ticket: int
    prepared: PreparedRequest
    batch_key: BatchKey
    overtakes: int = 0
    staging: Future[Staged] | None = None
    """Begun; the engine has not taken the result yet."""
    staged: Staged | None = None
    call: int = 0
    has_weights: bool = False
    """True once its slot holds its weights; not needed while the shared ones serve all slots."""

    @property
    def calls(self) -> int:
        """UNet calls from noise to image."""
        return len(self.prepared.schedule.table)

    def restart(self) -> None:
        """Back to the seed."""
        self.call, self.staging, self.staged, self.has_weights = 0, None, None, False


@dataclass(slots=True)
class SlotQueue:
    """Admitted jobs without a slot, oldest first."""

    max_overtakes: int
    """Younger jobs, mostly of a more frequent batch key, that may go before a job."""
    jobs: list[SlotJob] = field(default_factory=list)

    def put_back(self, jobs: Iterable[SlotJob]) -> None:
        self.jobs[:0] = jobs

    def next_batch_key(self) -> BatchKey | None:
        """The oldest job's key: the next one once all slots are free."""
        return self.jobs[0].batch_key if self.jobs else None

    def take(self, batch_key: BatchKey, preferred: LoraKey | None = None) -> SlotJob | None:
        """Removes the next job of a batch key, one with the LoRAs *preferred* if there is one.

        None if there is no such job, or none that may overtake the jobs before it.
        """
        oldest: SlotJob | None = None
        for job in self.jobs:
            if job.batch_key == batch_key:
                if preferred is None or job.prepared.lora_key == preferred:
                    return self._take(job)
                oldest = oldest or job
            if job.overtakes >= self.max_overtakes:
                break
        return self._take(oldest) if oldest else None

    def _take(self, job: SlotJob) -> SlotJob:
        at = self.jobs.index(job)
        for older in self.jobs[:at]:
            older.overtakes += 1
        return self.jobs.pop(at)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a tick in each mode, and of merging LoRAs into the shared weights.

    The defaults are guesses until a GPU is timed; a CPU never is.
    """

    per_slot_seconds: float = 0.105
    shared_seconds: float = 0.1
    merge_seconds: float = 0.02


def choose_mode(
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

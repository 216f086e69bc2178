"""Jobs on their way to a slot: which of them may share a call, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from worker.engine import contract
from worker.engine.lora import merge
from worker.engine.slots import prepare
from worker.engine.slots.linear import Factors, Group
from worker.engine.slots.pack import Packed
from worker.engine.text import CONTEXT_TOKENS

#: Chunks of a prompt that ordinary calls have room for. A prompt of one chunk is there twice, which
#: changes nothing that a softmax makes of it: no place has to be masked, a third of the time that
#: attention to prompts takes. Jobs with longer ones share calls among themselves only.
PLAIN_CHUNKS = 2

PLAIN_TOKENS = PLAIN_CHUNKS * CONTEXT_TOKENS

#: The shape of the other calls is a multiple of this: masks need it, and there are fewer shapes.
_TOKENS_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class SlotPrepared:
    """A request with its LoRAs packed; None where they have to be merged instead."""

    prepared: prepare.Prepared
    unet_loras: tuple[merge.Applied, ...]
    unet_changes: Packed | None
    text_changes: Packed | None

    @property
    def request(self) -> contract.ImageRequest:
        return self.prepared.request

    @property
    def lora_key(self) -> tuple[object, ...]:
        """What the UNet is changed by; empty for nothing."""
        return tuple(applied.key for applied in self.unet_loras)

    @property
    def tokens(self) -> int:
        """What its longer prompt takes of the context."""
        longest = max(len(self.prepared.prompt), len(self.prepared.negative_prompt))
        if longest <= PLAIN_CHUNKS:
            return PLAIN_TOKENS
        tokens = longest * CONTEXT_TOKENS
        return tokens + -tokens % _TOKENS_ALIGNMENT


class BatchKey(NamedTuple):
    """What jobs must have in common to share calls; the slots hold jobs of one lane at a time."""

    width: int
    height: int
    tokens: int
    merged: tuple[object, ...] | None
    """The LoRAs that have to be merged for it, where they have to."""
    alone: int | None
    """The ticket of a job that is suspected to break the calls of others."""

    @property
    def is_masked(self) -> bool:
        """Whether prompts may end before the room for them does."""
        return self.tokens != PLAIN_TOKENS


@dataclass(frozen=True, slots=True)
class Staged:
    """A job's data on the device, ready to be copied into a slot."""

    latents: torch.Tensor
    vectors: torch.Tensor
    """[2, tokens, width]: of the prompt and the negative prompt, filled up with zeros."""
    mask: torch.Tensor | None
    """[2, 1, 1, tokens]: what is added to the scores, in a masked lane."""
    factors: dict[Group, Factors]
    generator: torch.Generator


@dataclass(slots=True, eq=False)
class SlotJob:
    """One admitted request."""

    ticket: int
    ready: SlotPrepared
    batch_key: BatchKey
    overtaken: int = 0
    staged: Staged | None = None
    call: int = 0
    has_weights: bool = False
    """Whether its slot holds its weights: while all are merged alike, it need not."""

    @property
    def calls(self) -> int:
        return len(self.ready.prepared.schedule.table)

    def restart(self) -> None:
        """Back to its seed."""
        self.call, self.staged, self.has_weights = 0, None, False


@dataclass(slots=True)
class Waiting:
    """Admitted jobs without a slot, the oldest first."""

    max_overtakes: int
    """How often a job is overtaken at most by younger ones, those of a busier lane mostly."""
    jobs: list[SlotJob] = field(default_factory=list)

    def put_back(self, jobs: Iterable[SlotJob]) -> None:
        self.jobs[:0] = jobs

    def next_batch_key(self) -> BatchKey | None:
        """The lane whose turn it is once all slots are free: that of the oldest job."""
        return self.jobs[0].batch_key if self.jobs else None

    def take(
        self, batch_key: BatchKey, favoured: tuple[object, ...] | None = None
    ) -> SlotJob | None:
        """The next job of a lane, one with the LoRAs *favoured* if there is one.

        None where there is none, or none that may overtake the jobs before it.
        """
        oldest: SlotJob | None = None
        for job in self.jobs:
            if job.batch_key == batch_key:
                if favoured is None or job.ready.lora_key == favoured:
                    return self._take(job)
                oldest = oldest or job
            if job.overtaken >= self.max_overtakes:
                break
        return self._take(oldest) if oldest else None

    def _take(self, job: SlotJob) -> SlotJob:
        at = self.jobs.index(job)
        for older in self.jobs[:at]:
            older.overtaken += 1
        return self.jobs.pop(at)

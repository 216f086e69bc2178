"""Jobs waiting for a slot: which of them may share a call, which is next, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from imagefleet.files.safetensors import Identity
from worker.engine.lora.merge import NO_CHANGES, LoraChanges, LoraKey, Shape
from worker.engine.passes.checkpoints import CachedCheckpoint
from worker.engine.passes.images import ImageCoder
from worker.engine.sampler import Inpainting, NoiseStream
from worker.engine.slots.memory import WeightMode
from worker.engine.slots.prepare import AssembledLoras, PreparedRequest


class BatchKey(NamedTuple):
    """Properties that jobs must share to be drawn in one call; each key has a lane (`lane.py`)."""

    width: int
    height: int
    tokens: int
    #: The LoRAs that must be merged into the shared weights; None if slots can hold them.
    merged_loras: LoraKey | None
    #: The ticket of a job that runs alone, since it may be what breaks the calls of others.
    isolated: int | None
    #: The files of the ControlNets.
    controls: tuple[Identity, ...] = ()
    #: Rows that each image takes of a call: `PreparedRequest.rows`.
    slot_rows: int = 2
    #: True for one row without LoRAs: its slots need no weights of their own.
    is_plain: bool = False
    #: True for images that tile.
    tiles: bool = False
    #: True for jobs that change convolutions while others of their kind are compiled without.
    is_apart: bool = False
    #: The checkpoint that draws, if it is not the engine's own.
    checkpoint: Identity | None = None
    #: True if prompts may be shorter than the context.
    is_masked: bool = False

    @classmethod
    def of(cls, prepared: PreparedRequest) -> BatchKey:
        """The key of a request's first call."""
        request = prepared.request
        family = prepared.family
        tokens = prepared.tokens
        cell = family.cell
        key = cls(
            request.width // cell * cell,
            request.height // cell * cell,
            tokens,
            merged_loras=None if prepared.pack else prepared.lora_key or None,
            isolated=None,
            controls=tuple(each.identity for each in prepared.controls),
            tiles=request.tiling,
            checkpoint=prepared.checkpoint,
            is_masked=tokens > family.plain_tokens,
        )
        return key.at(prepared, prepared.begins)

    def at(self, prepared: PreparedRequest, call: int) -> BatchKey:
        """The key of a later call, which may take another number of rows."""
        rows = prepared.rows(call)
        has_own = prepared.family.has_slot_weights
        is_plain = rows == 1 and has_own and not prepared.lora_key
        return self._replace(slot_rows=rows, is_plain=is_plain)

    @property
    def is_rare(self) -> bool:
        """True if hardly any job has this key: it is not compiled."""
        return self.changes_shared_weights or self.isolated is not None

    @property
    def changes_shared_weights(self) -> bool:
        """True if no other lane may run meanwhile."""
        return self.merged_loras is not None or self.checkpoint is not None


#: Extra inputs of some UNets beside the texts' vectors: pooled vectors [texts, width] and
#: `Family.size_ids` [texts, numbers]; or the level [1] of the noise on an enlarged image.
AddedInputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Staged:
    """A job's data on the device, ready to be copied into a slot."""

    #: [4, height, width]
    latents: Tensor
    #: [texts, tokens, width]: of `PreparedRequest.texts`, padded with zeros; or states.
    vectors: Tensor
    #: The image's noise after its first, which `latents` has.
    noise: NoiseStream
    #: [texts, 1, 1, tokens], added to the attention scores; None for an unmasked batch key.
    mask: Tensor | None = None
    added: AddedInputs | None = None
    #: The tensor of the UNet's LoRAs, of which `changes` are views.
    loras: Tensor | None = None
    #: None once the slot holds the weights: `Stager.changes_of` copies them again.
    changes: LoraChanges = NO_CHANGES
    #: Kept area of the image, without the batch dimension; None if nothing is kept.
    inpainting: Inpainting | None = None
    #: [channels, height, width] for each ControlNet: its embedded image.
    hints: Sequence[Tensor] = ()
    #: [sampler.HISTORY, 4, height, width]: earlier estimates of an image that comes from another
    #: lane; None for one that begins.
    history: Tensor | None = None
    #: [channels, height, width]: of `ImageCoder.condition`, or the image that an upscaler enlarges,
    #: with noise; None for ordinary checkpoints.
    conditioning: Tensor | None = None

    #: The VAE that the request names, kept on the device by this, or that for images that tile.
    coder: ImageCoder | None = None
    #: The checkpoint that draws, kept by this.
    checkpoint: CachedCheckpoint | None = None

    def with_kept(self, latents: Tensor) -> Tensor:
        """Latents with those of the image that an inpainting keeps, if any."""
        if self.inpainting is None:
            return latents
        kept, original = self.inpainting
        return latents * (1 - kept) + original * kept

    @property
    def tensors(self) -> list[Tensor]:
        found = [
            self.latents,
            self.history,
            self.vectors,
            self.mask,
            self.conditioning,
            self.loras,
        ]
        found += self.added or ()
        found += self.inpainting or ()
        found += self.hints
        return [tensor for tensor in found if tensor is not None]


@dataclass(eq=False)
class SlotJob:
    """One admitted request."""

    ticket: int
    prepared: PreparedRequest
    batch_key: BatchKey
    #: True if it goes before those that are not.
    is_urgent: bool = False

    overtakes: int = 0
    #: LoRAs being put together in the host's memory, before the device has room for them.
    assembling: Future[AssembledLoras] | None = None
    #: The copy to the device, until the engine has taken its result.
    staging: Future[Staged] | None = None
    staged: Staged | None = None
    call: int = 0
    #: Inputs and latents of the pass before this one; None in a first pass.
    first_pass: Staged | None = None
    #: The event after the tick that drew these latents.
    drawn: torch.cuda.Event | None = None
    #: The original of `prepared`, before its schedule was extended.
    begun_with: PreparedRequest | None = None
    #: True once its slot holds its weights; not needed while the shared ones serve all slots.
    has_weights: bool = False

    @property
    def data(self) -> Staged:
        """Inputs of the request on the device; raises RuntimeError before they are staged."""
        if self.staged is None:
            raise RuntimeError("a job is drawn only once it is staged")
        return self.staged

    @property
    def is_being_staged(self) -> bool:
        return self.staging is not None and not self.staging.done()

    @property
    def ranks(self) -> Mapping[Shape, int]:
        """Ranks of what its slot holds beside the weights: changes of convolutions, if any."""
        return self.prepared.pack.ranks if self.prepared.pack else {}

    @property
    def changes_convolutions(self) -> bool:
        return bool(self.ranks)

    @property
    def calls(self) -> int:
        """The number of its schedule's calls when this pass ends."""
        return self.prepared.ends or len(self.prepared.schedule.table)

    @property
    def is_halfway(self) -> bool:
        """True after half of the calls of its first pass, if its estimate is looked at."""
        drawn = self.prepared
        schedule = drawn.schedule
        if drawn.request.stop is None or drawn.upscaling or schedule.extend:
            return False
        return self.call == len(schedule.table) // 2

    def extend(self, latents: Tensor, history: Tensor) -> None:
        """Makes its schedule longer after the last call, if that depends on its latents."""
        extend = self.prepared.schedule.extend
        if extend is not None:
            self.begun_with = self.begun_with or self.prepared
            schedule = extend(latents, history, self.data.noise.fill)
            self.prepared = replace(self.prepared, schedule=schedule)

    def forget_loras(self) -> None:
        """Frees the copy of what its slot holds now; not if its texts change, which take it too."""
        if not self.prepared.is_edited:
            self.staged = replace(self.data, loras=None, changes=NO_CHANGES)

    def restart(self) -> None:
        """Back to the seed; in the second pass to that pass' beginning."""
        self.prepared = self.begun_with or self.prepared
        self.call = self.prepared.begins
        self.has_weights = False
        self.batch_key = self.batch_key.at(self.prepared, self.call)
        self.assembling = self.staging = self.staged = None


@dataclass(frozen=True)
class Costs:
    """Seconds of a tick in each mode, of merging LoRAs into the shared weights, and of compiling.

    The defaults are guesses until a GPU is timed; a CPU never is.
    """

    per_slot_seconds: float = 0.105
    per_slot_convolutions_seconds: float = 0.11
    shared_seconds: float = 0.1
    merge_seconds: float = 0.02
    #: Seconds to compile one graph beside the ticks.
    graph_seconds: float = 40.0
    #: Share of an uncompiled tick's seconds that compiling it saves.
    saved_share: float = 0.35

    def seconds(self, mode: WeightMode) -> float:
        found: float = getattr(self, f"{mode}_seconds")
        return found


def own_mode(convolutions: bool) -> WeightMode:
    """The mode of slots with weights of their own, and with changes of *convolutions*, if any."""
    return "per_slot_convolutions" if convolutions else "per_slot"


def choose_mode(
    keys: Collection[LoraKey],
    merged: LoraKey | None,
    ticks: int,
    costs: Costs,
    *,
    convolutions: bool = False,
) -> tuple[WeightMode, LoraKey]:
    """The mode for slots with the LoRAs *keys*, and what the shared weights must hold for it.

    *merged* is what the shared weights hold now, None if unknown; *ticks* is for how long the slots
    are expected to keep these LoRAs. *convolutions*: some of them change convolutions.
    """
    own = own_mode(convolutions)
    key, *others = set(keys)
    saved_seconds = ticks * (costs.seconds(own) - costs.shared_seconds)
    is_worth_merging = key in (merged, ()) or saved_seconds > costs.merge_seconds
    if is_worth_merging and not others:
        return "shared", key
    return own, ()


def ticks_until_change(
    remaining: Sequence[int], waiting: Sequence[int], slots: int
) -> int:
    """Ticks until the LoRAs change: UNet calls *remaining* in the slots, and of jobs *waiting*."""
    return max(remaining, default=0) + math.ceil(sum(waiting) / slots)

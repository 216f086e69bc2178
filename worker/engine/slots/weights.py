"""Manages the weights: LoRAs merged for all lanes, per-slot weights by block, other checkpoints.

Weights of one slot that are reloaded are copied while the image before is decoded, and only for
other LoRAs than they hold.

An engine takes another checkpoint of the same architecture by copying its weights into the tensors
that it has: whatever is compiled for them goes on.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imagefleet.files.safetensors import Identity
from imagefleet.validation import JSONDict
from worker.engine import checksums
from worker.engine.checkpoint import Checkpoint
from worker.engine.families import table
from worker.engine.lora import merge
from worker.engine.lora.merge import AppliedLora, LoraKey
from worker.engine.networks.transformer import SlotNetwork
from worker.engine.passes.checkpoints import CachedCheckpoint
from worker.engine.slots import queue
from worker.engine.slots.lane import Lane
from worker.engine.slots.parts import Parts
from worker.engine.slots.queue import SlotJob
from worker.engine.slots.step import Step, StepRunner

#: Keys of a configuration that say nothing of what a network computes.
_UNIMPORTANT = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version"}
)


class _Held(NamedTuple):
    #: Merged into what was loaded.
    shared: LoraKey | None
    #: Merged after that, in the slot.
    own: LoraKey


class Weights:
    """Brings the weights into the state that a lane's tick needs."""

    def __init__(self, parts: Parts, runner: StepRunner) -> None:
        #: LoRAs merged into the shared weights; None if unknown.
        self.merged: LoraKey | None = ()
        self._unet = unet = parts.unet
        self._original = parts.model.unet
        self._checkpoints = parts.caches.checkpoints
        # Whose weights are in place of the engine's own, which that one keeps meanwhile.
        self._other: CachedCheckpoint | None = None
        self._merger = parts.merger
        self._runner = runner
        self._stager = parts.stager
        self._folds = parts.settings.packages is not None or unet.device.type == "cuda"
        # The lane whose jobs' weights are in each block.
        self._loaded: dict[int, Lane] = {}
        # Reloaded: what the slot's weights are made of; None if unknown.
        self._held: _Held | None = _Held((), ())
        self._is_reloaded = unet.weights == "reloaded"
        self._stream: torch.cuda.Stream | None = None
        self._last_step: torch.cuda.Event | None = None
        self._is_loading = False
        if self._is_reloaded and unet.device.type == "cuda":
            self._stream = torch.cuda.Stream(unet.device)  # type: ignore[no-untyped-call]
        #: True if the next job should start as soon as a slot is free, not with the next tick.
        self.loads_while_decoding = self._stream is not None

    @property
    def preferred(self) -> LoraKey | None:
        """The LoRAs that the next job need not wait for, if any are merged."""
        if self._is_reloaded:
            return (self._held and self._held.own) or None
        return self.merged or None

    def resize(self, block_slots: Sequence[int]) -> None:
        """Allocates the first block of slots' weights anew, the others at their first use."""
        self._forget()
        self._unet.resize(*block_slots)

    def renew(self) -> None:
        """Starts over after the checkpoint's weights have been replaced; no slot is in use."""
        self._forget()
        self._merger.reset()
        self.merged = ()
        if self._folds:
            self._unet.fold()

    def unet_of(self, checkpoint: Identity | None) -> SlotNetwork:
        """UNet of a checkpoint's lanes: the engine's own, or one of another architecture."""
        held = self._find(checkpoint)
        if held is None:
            return self._unet
        return held.unet or self._unet

    def use(self, checkpoint: Identity | None) -> None:
        """Exchanges all weights for those of another checkpoint, or for the engine's own again.

        One with a UNet of its own needs none of them.
        """
        following = self._find(checkpoint)
        if following is self._other or (
            following is not None and following.unet is not None
        ):
            return
        self.merged = None  # unknown until it is done: it may fail halfway
        self._merge_and_time(())
        for cached in filter(None, (self._other, following)):
            cached.exchange(self._original)
            self._other = cached if cached is following else None
            self.renew()

    def choose_mode(self, lane: Lane, step: Step, active: Iterable[SlotJob]) -> None:
        """Sets a lane's weight mode, and the shared weights; *active*: the jobs in all slots."""
        if step.unet is not self._unet:
            return
        jobs = lane.active.values()
        changes = any(job.changes_convolutions for job in jobs)
        if lane.batch_key.merged_loras is not None:
            lane.weight_mode = "shared"
            to_merge = lane.batch_key.merged_loras
        elif self._is_reloaded:
            lane.weight_mode = queue.own_mode(changes)
            to_merge = ()
        else:
            keys = {job.prepared.lora_key for job in jobs}
            if keys != {()}:
                # Merging for one lane alone would mean merging at each turn.
                keys |= {job.prepared.lora_key for job in active}
            waiting = [
                job.calls for job in lane.waiting if job.prepared.lora_key in keys
            ]
            remaining = [job.calls - job.call for job in jobs]
            ticks = queue.ticks_until_change(remaining, waiting, lane.slots)
            costs = self._runner.costs
            lane.weight_mode, to_merge = queue.choose_mode(
                keys, self.merged, ticks, costs, convolutions=changes
            )
        step.mode_usage.note(lane.weight_mode)
        lane.weight_mode = step.mode_for(lane.weight_mode)
        if lane.weight_mode != "shared":
            to_merge = ()
        if to_merge != self.merged:
            loras: Sequence[AppliedLora] = ()
            if to_merge:
                prepared = next(iter(jobs)).prepared
                loras = prepared.loras[prepared.family.backbone]
            self.merged = None  # unknown until it is done: it may fail halfway
            self._merge_and_time(loras)
            self.merged = to_merge

    def changing_slots(self, lane: Lane) -> int:
        """The slots of a lane, its first ones, for jobs that change convolutions."""
        unet = self._unet
        if lane.step is None or lane.step.unet is not unet:
            return lane.slots
        unet.changes.expect(few=self._runner.outlook.changes_few)
        are_there = unet.changes.exist or any(
            job.changes_convolutions for job in lane.waiting
        )
        if lane.batch_key.merged_loras is not None or not are_there:
            return lane.slots
        return min(lane.slots, unet.changes.slots_of(lane.block))

    def make_room(self, lane: Lane, held: Sequence[SlotJob]) -> None:
        """Makes room for a lane's changes of convolutions; if it grows, all are loaded again.

        Then for those of all jobs *held*, so that less often is compiled anew. The first one makes
        room before its turn: the first graph is compiled by then, and has to serve it.
        """
        changes = self._unet.changes
        needing = lane.active.values() if changes.exist else held
        if changes.has_room(each for job in needing for each in job.ranks.items()):
            return
        self._runner.drop_convolutions()
        changes.grow(each for job in held for each in job.ranks.items())
        self._held = None
        for job in held:
            job.has_weights = job.has_weights and not job.ranks

    def load(self, lane: Lane) -> None:
        """Loads the weights of the slots that do not have them, or have another lane's."""
        if lane.step is not None and lane.step.unet is not self._unet:
            return
        if self._is_reloaded:
            for job in lane.active.values():  # one at most
                own = () if lane.weight_mode == "shared" else job.prepared.lora_key
                self._hold(_Held(self.merged, own), job)
                if self._stream is not None and job.data.loras is not None:
                    job.data.loras.record_stream(self._stream)
                job.forget_loras()
            return
        if lane.weight_mode == "shared":
            return
        self._unet.use_block(lane.block, lane.slots)
        if self._loaded.get(lane.block) is not lane:
            self._loaded[lane.block] = lane
            for job in lane.active.values():
                job.has_weights = False
        for slot, job in lane.active.items():
            if not job.has_weights:
                self._unet.load_slot(slot, self._stager.changes_of(job))
                job.has_weights = True
                job.forget_loras()

    def without_own(self) -> dict[str, Tensor]:
        """Restores the checkpoint's own weights; returns a reloaded slot's, by parameter."""
        self.use(None)
        if not self._is_reloaded:
            return {}
        self._hold(_Held(self.merged, ()))
        self.finish_loading()
        return self._unet.reloaded

    def may_move(self, lane: Lane, job: SlotJob) -> bool:
        """True if a job should move to the lane that draws images with the rows of its next call.

        Not from two rows to one with LoRAs merged into a slot's own weights: there and back, these
        take longer to load than the row.
        """
        held = lane.batch_key.slot_rows
        if (rows := job.prepared.rows(job.call)) >= held:
            return rows > held
        is_merged = self._unet.weights == "merged" and lane.weight_mode != "shared"
        if is_merged and job.prepared.lora_key:
            return False
        key = lane.batch_key.at(job.prepared, job.call)
        return self._runner.lane_key(key).slot_rows < held

    def finish_loading(self) -> None:
        """Makes the next step wait for weights that are being loaded."""
        if self._stream is not None and self._is_loading:
            torch.cuda.current_stream(self._unet.device).wait_stream(self._stream)
            self._is_loading = False

    def note_step(self) -> None:
        """Notes the end of a step: the slot's weights may be reloaded from here on."""
        if self._stream is not None:
            self._last_step = torch.cuda.current_stream(
                self._unet.device
            ).record_event()

    def _hold(self, needed: _Held, job: SlotJob | None = None) -> None:
        """Loads the only slot, with the LoRAs of a *job*, unless it holds what is *needed*."""
        if needed == self._held:
            return
        self._held = None  # unknown until it is done: it may fail halfway
        with self._beside_decoding():
            self._unet.load_slot(
                0, self._stager.changes_of(job) if job else merge.NO_CHANGES
            )
        self._held = needed

    @contextlib.contextmanager
    def _beside_decoding(self) -> Iterator[None]:
        """Loads on a stream of its own, after the last step; see `finish_loading`."""
        if self._stream is None:
            yield
            return
        if self._last_step is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._unet.device))
        else:
            self._stream.wait_event(self._last_step)
        self._is_loading = True
        with torch.cuda.stream(self._stream):
            yield

    def _find(self, checkpoint: Identity | None) -> CachedCheckpoint | None:
        if checkpoint is None or self._checkpoints is None:
            return None
        return self._checkpoints.get(checkpoint)

    def _forget(self) -> None:
        self._loaded.clear()
        self._held = None

    def _merge_and_time(self, loras: Sequence[AppliedLora]) -> None:
        """Merges LoRAs into the shared weights; none restores the checkpoint's own."""
        device = self._unet.device
        is_timed = device.type == "cuda" and bool(loras)
        if is_timed:
            torch.cuda.synchronize(device)
        elif self._stream is not None:
            self._stream.synchronize()  # it may still read what is changed now
        began_at = time.perf_counter()
        self._merger.activate(loras)
        if self._folds:
            self._unet.fold()
        if is_timed:
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began_at
            self._runner.costs = replace(self._runner.costs, merge_seconds=seconds)


def is_alike(one: Checkpoint, other: Checkpoint) -> bool:
    """True if an engine for one checkpoint can draw with the other's weights instead."""

    def traits(checkpoint: Checkpoint) -> tuple[object, ...]:
        tokenizer = checkpoint.tokenizer
        shapes = {
            name: (parameter.shape, parameter.dtype)
            for name, parameter in checksums.named_parameters(
                checkpoint.networks
            ).items()
        }
        return (
            checkpoint.family.slug,
            checkpoint.default_size,
            (tokenizer.bos_token_id, tokenizer.eos_token_id),
            {name: _configuration(each) for name, each in checkpoint.networks.items()},
            shapes,
        )

    return traits(one) == traits(other)


def may_refine(refiner: Checkpoint, own: Checkpoint) -> bool:
    """True if SDXL's refiner can go on with a checkpoint's images."""

    def traits(checkpoint: Checkpoint) -> tuple[object, ...]:
        encoder = [*checkpoint.text_encoders.values()][-1]
        tokenizer = checkpoint.tokenizer
        tokens = (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            encoder.config.vocab_size,
        )
        return (
            *tokens,
            checkpoint.factor,
            checkpoint.channels,
            checkpoint.conditioning_channels,
        )

    families = own.family, refiner.family
    return families == (table.SDXL, table.REFINER) and traits(refiner) == traits(own)


def _configuration(network: Any) -> JSONDict:
    config = network.config
    found = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and name not in _UNIMPORTANT
    }

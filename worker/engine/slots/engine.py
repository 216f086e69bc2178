"""The slot engine: each tick is one UNet call and one sampler step for every image in a slot.

Each slot holds one image with its own latents, schedule, guidance scale, prompts and LoRAs, and is
refilled the tick after its image is done, so no image waits for another to finish. The host tracks
every slot's step, so a tick reads nothing back from the GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from imagefleet import errors
from worker.engine import contract, decoder
from worker.engine import errors as engine_errors
from worker.engine.checkpoint import Checkpoint
from worker.engine.kernels import layers
from worker.engine.lora import merge
from worker.engine.self_check import SelfCheck
from worker.engine.slots import linear, memory, prepare, queue
from worker.engine.slots.prepare import PreparedRequest
from worker.engine.slots.queue import BatchKey, SlotJob, SlotQueue
from worker.engine.slots.staging import Stager
from worker.engine.slots.step import GUIDANCE, StepRunner, tick
from worker.engine.slots.unet import SlotUnet

log = logging.getLogger(__name__)

#: Requests held per slot: one in it, and one ready for it.
_REQUESTS_PER_SLOT = 2

#: Younger jobs per slot that may overtake a job of a rare size (or with a LoRA that must be
#: merged). A change of batch key costs about one image per slot, so this bounds what rare sizes
#: cost the rest; more lets them wait longer.
_OVERTAKES_PER_SLOT = 6


class SlotEngine:
    """A `contract.Engine` that draws *slots* images at once, each at its own step."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        slots: int | None = None,
        *,
        backend: str | None = None,
        compiled_modes: Sequence[queue.WeightMode] = queue.WEIGHT_MODES,
        lora_cache_bytes: int = prepare.LORA_CACHE_BYTES,
        rank_capacity: int = prepare.RANK_CAPACITY,
    ) -> None:
        """*slots* None fits them to the GPU's memory.

        *backend* is torch.compile's, None for no compilation; the UNet is compiled for the
        *compiled_modes*, in this order. LoRAs above *rank_capacity* are merged.
        """
        self.model_name = checkpoint.name
        self.default_size = checkpoint.default_size
        self.weight_mode: queue.WeightMode = "shared"
        """The last tick's."""
        self.recompiles = 0
        """Graphs compiled after the warm-up; above 0 is a bug."""
        self._checkpoint = checkpoint
        self._device: torch.device = checkpoint.unet.device
        self._on_gpu = self._device.type == "cuda"
        self._compiles = backend is not None
        if self._compiles:
            layers.replace_group_norms(checkpoint.unet)
            layers.replace_group_norms(checkpoint.vae)
            layers.replace_upsamplers(checkpoint.vae)
        self._stager = Stager(checkpoint)
        self._merger = merge.Merger(checkpoint.unet, checkpoint.text_encoder)
        self._unet = SlotUnet(checkpoint.unet)
        if self._compiles:
            self._unet.fold()
        self.self_check = SelfCheck(
            checkpoint,
            self._merger,
            {"unet": self._unet, "vae": checkpoint.vae},
            self._stager.text_encoder_lock,
        )
        self._preparer = prepare.RequestPreparer(
            checkpoint,
            {
                "unet": self._unet.groups,
                "text_encoder": linear.group_by_shape(checkpoint.text_encoder),
            },
            lora_cache_bytes=lora_cache_bytes,
            rank_capacity=rank_capacity,
        )
        self.lora_lookups = self._preparer.lora_lookups
        pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._decoder = decoder.Decoder(checkpoint.vae, backend=backend, pool=pool)
        self._runner = StepRunner(
            self._unet,
            slots or memory.CPU_SLOTS,
            checkpoint=checkpoint,
            backend=backend,
            compiled_modes=compiled_modes,
            pool=pool,
        )
        if slots is None and self._on_gpu:
            self._fit_memory()
        self._unet.resize(self.slots)
        self._decoder.max_images = self.slots
        self._merged: merge.LoraKey | None = ()
        self._active: dict[int, SlotJob] = {}
        self._queue = SlotQueue(_OVERTAKES_PER_SLOT * self.slots)

    @property
    def slots(self) -> int:
        """Images drawn at once; reduced when the memory runs out."""
        return self._runner.slots

    @property
    def capacity(self) -> int:
        return self.slots * _REQUESTS_PER_SLOT

    @property
    def free(self) -> int:
        return max(0, self.capacity - len(self._queue.jobs) - len(self._active))

    @property
    def busy(self) -> bool:
        return bool(self._active or self._queue.jobs or self._decoder.busy)

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest:
        """See `RequestPreparer.prepare`."""
        return self._preparer.prepare(request)

    def admit(self, ticket: int, prepared: contract.PreparedRequest) -> None:
        if not isinstance(prepared, PreparedRequest):
            raise TypeError("prepared by another engine")
        request = prepared.request
        merged = prepared.lora_key if prepared.unet_pack is None else None
        batch_key = BatchKey(request.width, request.height, prepared.tokens, merged, None)
        self._queue.jobs.append(SlotJob(ticket, prepared, batch_key))

    def tick(self) -> list[contract.Finished]:
        """Fills the free slots and runs one step of all; returns the finished images.

        Raises:
            NodeError: the GPU itself is broken.
        """
        finished: list[contract.Finished] = []
        failure: errors.FleetError | None = None
        out_of_memory = False
        try:
            self._refill(finished)
            if self._active:
                self._step()
                self._stage_ahead()
        except Exception as error:  # any failure is handled below; NodeError is raised here
            failure = engine_errors.classify(error)
            out_of_memory = engine_errors.is_out_of_memory(error)
            log.warning(
                "a tick of %d images failed: %s",
                len(self._active),
                failure.message,
                exc_info=True,
                extra={"action": "tick_failed"},
            )
        if failure is not None:
            # Outside the handler, where the error's traceback no longer holds any tensors.
            self._recover(finished, failure, out_of_memory=out_of_memory)
        self._decoder.run(flush=not self._active)
        self.recompiles = self._runner.recompiles + self._decoder.recompiles
        is_last = not self._active and not self._queue.jobs
        return finished + self._decoder.collect(wait=is_last and not finished)

    def warm_up(self, width: int, height: int) -> None:
        """Compiles, records and times all that a size needs; a minute or two on a GPU."""
        if self._active:
            raise RuntimeError("warm up only while no image is being drawn")
        began_at = time.monotonic()
        batch_key = self._runner.plain_batch_key(width, height)
        while True:
            try:
                self._runner.warm_up(batch_key)
                break
            except Exception as error:
                if self.slots == 1 or not engine_errors.is_out_of_memory(error):
                    raise
            self._shrink(self.slots // 2)
        self._decoder.warm_up(self._runner.make_slot_state(batch_key, 1).latents.shape[1:])
        log.info(
            "%d slots of %dx%d ready after %.0f s; a step of all slots takes %.1f ms, %.1f ms with"
            " weights per slot",
            self.slots,
            width,
            height,
            time.monotonic() - began_at,
            1000 * self._runner.costs.shared_seconds,
            1000 * self._runner.costs.per_slot_seconds,
            extra={"action": "warm"},
        )

    def close(self) -> None:
        self._queue.jobs.clear()
        self._active.clear()
        self._runner.reset(compile_again=False)
        self._decoder.clear()
        self._stager.close()
        self._merger.close()
        self._unet.close()
        for network in (self._checkpoint.unet, self._checkpoint.vae, self._checkpoint.text_encoder):
            network.to("meta")
        torch.cuda.empty_cache()

    # The parts of a tick.

    def _refill(self, finished: list[contract.Finished]) -> None:
        """Moves the next jobs into the free slots; those that cannot start are finished."""
        if not self._active:
            batch_key = self._queue.next_batch_key()
            if batch_key is None:
                return
            if self._runner.should_compile(batch_key):
                self.warm_up(batch_key.width, batch_key.height)
            self._runner.activate(batch_key)
        batch_key = self._runner.batch_key
        if batch_key is None or (self._active and self._runner.should_compile(batch_key)):
            return  # compiled once its slots are free
        started = self._fill(batch_key, finished)
        if not self._active:
            return
        self._choose_weight_mode(batch_key)
        for slot in started:
            self._start(slot, self._active[slot])
        if self.weight_mode == "per_slot":
            for slot, job in self._active.items():
                if not job.has_weights and job.staged is not None:
                    self._unet.load_slot(slot, job.staged.factors)
                    job.has_weights = True

    def _fill(self, batch_key: BatchKey, finished: list[contract.Finished]) -> list[int]:
        """Assigns jobs to the free slots; returns these slots."""
        started: list[int] = []
        for slot in range(1 if batch_key.isolated is not None else self.slots):
            while slot not in self._active:
                job = self._queue.take(batch_key, self._merged or None)
                if job is None:
                    return started
                # Already active: should the memory run out, it restarts with the others.
                self._active[slot] = job
                if failure := self._try_to_stage(job):
                    finished.append(failure)
                    del self._active[slot]
                else:
                    started.append(slot)
        return started

    def _choose_weight_mode(self, batch_key: BatchKey) -> None:
        jobs = self._active.values()
        if batch_key.merged_loras is not None:
            self.weight_mode, to_merge = "shared", batch_key.merged_loras
        else:
            keys = {job.prepared.lora_key for job in jobs}
            waiting = [job.calls for job in self._queue.jobs if job.prepared.lora_key in keys]
            remaining = [job.calls - job.call for job in jobs]
            ticks = queue.ticks_until_change(remaining, waiting, self.slots)
            self.weight_mode, to_merge = queue.choose_mode(
                keys, self._merged, ticks, self._runner.costs
            )
            if not self._runner.can_run(self.weight_mode):
                self.weight_mode, to_merge = "per_slot", ()
        if to_merge != self._merged:
            loras = next(job.prepared.unet_loras for job in jobs) if to_merge else ()
            self._merged = None  # unknown until it is done: it may fail halfway
            self._merge_and_time(loras)
            self._merged = to_merge

    def _merge_and_time(self, loras: Sequence[merge.AppliedLora]) -> None:
        """Merges LoRAs into the shared weights; none restores the checkpoint's own."""
        if not (self._on_gpu and loras):
            self._merge(loras)
            return
        torch.cuda.synchronize(self._device)
        began_at = time.perf_counter()
        self._merge(loras)
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - began_at
        self._runner.costs = replace(self._runner.costs, merge_seconds=seconds)

    def _merge(self, loras: Sequence[merge.AppliedLora]) -> None:
        self._merger.activate(loras)
        if self._compiles:
            self._unet.fold()

    @torch.no_grad()
    def _start(self, slot: int, job: SlotJob) -> None:
        """Copies a staged job into its slot."""
        state, staged = self._runner.active.state, job.staged
        if staged is None:
            raise RuntimeError("a job starts only once it is staged")
        rows = slice(2 * slot, 2 * slot + 2)
        state.latents[slot].copy_(staged.latents)
        # An earlier image's history has weight 0, but 0 times NaN would still be NaN.
        state.history[:, slot].zero_()
        if state.mask is not None and staged.mask is not None:
            state.mask[rows].copy_(staged.mask)
        factors = staged.factors if self.weight_mode == "per_slot" else {}
        state.context[rows].copy_(self._unet.keys_values.compute(staged.vectors, factors))

    def _step(self) -> None:
        """Runs one step of all slots and passes finished latents to the decoder."""
        step = self._runner.active
        inputs = step.feeder.next_inputs()
        inputs.rows.zero_()
        noisy = False
        for slot, job in self._active.items():
            schedule = job.prepared.schedule
            inputs.rows[slot, :GUIDANCE] = schedule.table[job.call]
            inputs.rows[slot, GUIDANCE] = job.prepared.request.cfg_scale
            if schedule.noisy[job.call] and job.staged is not None:
                shape = inputs.noise[slot].shape
                torch.randn(shape, generator=job.staged.generator, out=inputs.noise[slot])
                noisy = True
        step.feeder.send(inputs, noisy=noisy)
        self._runner.run(self.weight_mode, max(self._active) + 1)
        for slot, job in list(self._active.items()):
            job.call += 1
            if job.call == job.calls:
                self._decoder.add(job.ticket, step.state.latents[slot].clone())
                self._runner.count_image()
                del self._active[slot]

    def _stage_ahead(self) -> None:
        """Begins to stage the next jobs, whose LoRAs may take as much room as a slot's weights."""
        staged_bytes = 0
        soon: list[SlotJob] = []
        for job in self._queue.jobs[: self.slots]:
            packed = job.prepared.unet_pack
            staged_bytes += packed.flat.nbytes if packed else 0
            if staged_bytes > self._unet.slot_bytes and soon:
                break
            soon.append(job)
        self._stager.begin(soon)

    def _try_to_stage(self, job: SlotJob) -> contract.Finished | None:
        """The failure of a job whose own prompt or LoRA is at fault."""
        try:
            self._stager.stage(job)
        except Exception as error:  # any failure is this job's outcome
            if engine_errors.is_out_of_memory(error):
                raise
            return contract.Finished(job.ticket, engine_errors.classify(error))
        return None

    # Recovery and memory.

    def _recover(
        self, finished: list[contract.Finished], failure: errors.FleetError, *, out_of_memory: bool
    ) -> None:
        """Restarts in-flight images from their seeds, in a way that is less likely to fail.

        First without compilation, then with fewer slots (out of memory) or each job alone; a job
        that fails alone is finished.
        """
        jobs = list(self._active.values()) or self._queue.jobs[:1]
        compiled = self._runner.is_compiled
        in_call = self.slots if compiled else len(jobs)
        self._active.clear()
        self._queue.jobs = [job for job in self._queue.jobs if job not in jobs]
        for job in [*jobs, *self._queue.jobs]:
            job.restart()
        if compiled and not out_of_memory:
            log.warning(
                "compilation is off from now on: a compiled tick failed",
                extra={"action": "compile_dropped"},
            )
        elif in_call == 1:
            finished.extend(contract.Finished(job.ticket, failure) for job in jobs)
            jobs = []
        elif out_of_memory:
            self._shrink(in_call // 2)
        else:
            for job in jobs:
                job.batch_key = job.batch_key._replace(isolated=job.ticket)
        self._queue.put_back(jobs)
        self._runner.reset(compile_again=not compiled or out_of_memory)
        torch.cuda.empty_cache()

    def _shrink(self, slots: int) -> None:
        log.warning("out of memory: reduced to %d slots", slots, extra={"action": "slots_shrunk"})
        self._runner.reset(compile_again=True)
        self._runner.slots = slots
        self._decoder.max_images = slots
        self._unet.resize(slots)
        torch.cuda.empty_cache()

    @torch.no_grad()
    def _fit_memory(self) -> None:
        """Sets the slots that fit the GPU's memory, for images of the checkpoint's native size."""
        width, height = self.default_size
        state = self._runner.make_slot_state(self._runner.plain_batch_key(width, height), 1)

        state_bytes = sum(tensor.nbytes for tensor in state if tensor is not None)
        self._runner.slots, decoded = memory.fit(
            self._device,
            self._unet.slot_bytes + state_bytes,
            lambda: tick(self._unet, False, *state),
            lambda: decoder.decode(self._checkpoint.vae, state.latents),
        )
        self._decoder.slice_pixels = decoded * width * height

"""The engine of slots: every tick draws one step of as many images as the GPU has room for.

A slot is one image on its way, with its own latents, schedule, guidance, prompts and weights. It is
refilled the tick after its image is done, so no image waits for another to finish. The host knows
every slot's step, so nothing in a tick is read back from the GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from imagefleet import errors
from worker.engine import contract, decoder
from worker.engine import errors as engine_errors
from worker.engine.checkpoint import Checkpoint
from worker.engine.kernels import attention, group_norm, upsample
from worker.engine.lora import merge, names
from worker.engine.slots import memory, mode, pack
from worker.engine.slots import prepare as intake
from worker.engine.slots.linear import Group
from worker.engine.slots.queue import BatchKey, SlotJob, SlotPrepared, Waiting
from worker.engine.slots.runner import StepRunner
from worker.engine.slots.staging import Stager
from worker.engine.slots.step import GUIDANCE, tick
from worker.engine.slots.unet import SlotUnet

log = logging.getLogger(__name__)

#: Requests held for each slot: one in it, and one ready for it.
_LOOKAHEAD = 2

#: Images by which a request of a rare size (or with a LoRA that has to be merged) is overtaken at
#: most, for each slot. A change of lane costs about one image for each slot, so this bounds what
#: rare sizes cost the rest; more lets them wait longer.
_PATIENCE_FOR_EACH_SLOT = 6

#: Jobs staged in a tick ahead of their turn: one image ends in a tick where all have as many steps
#: as there are slots, and each staged job holds its LoRAs on the device.
_STAGED_IN_A_TICK = 2


class SlotEngine:
    """A `contract.Engine` that holds *slots* images at once, each at its own step."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        slots: int | None = None,
        *,
        lora_cache_bytes: int,
        rank_capacity: int = 64,
        backend: str | None = None,
        compiled_ways: Sequence[mode.WeightMode] = mode.ALL,
        attention_kernel: str = "auto",
        slice_pixels: int = decoder.SLICE_PIXELS,
    ) -> None:
        """*slots* None takes as many as there is memory for.

        LoRAs of a rank over *rank_capacity* are merged. *backend* is torch.compile's, None to run
        everything as it is; it compiles the UNet in the *compiled_ways*, in this order.
        *attention_kernel* is 'auto' or one of `attention.KERNELS`.
        """
        self._checkpoint = checkpoint
        self._device: torch.device = checkpoint.unet.device
        self._on_gpu = self._device.type == "cuda"
        self._preparer = intake.RequestPreparer(checkpoint, lora_cache_bytes)
        self._compiles = backend is not None
        if self._compiles:
            group_norm.replace(checkpoint.unet)
            group_norm.replace(checkpoint.vae)
            upsample.replace(checkpoint.vae)
        self._stager = Stager(checkpoint)
        self._merger = merge.Merger(checkpoint.unet, checkpoint.text_encoder)
        self._unet = SlotUnet(checkpoint.unet)
        if self._compiles:
            self._unet.fold()
        self._groups: Mapping[names.Network, Mapping[Group, Sequence[str]]] = {
            "unet": self._unet.groups,
            "text_encoder": pack.group_by_shape(checkpoint.text_encoder),
        }
        self._rank_capacity = rank_capacity
        pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._decoder = decoder.Decoder(
            checkpoint.vae, slice_pixels=slice_pixels, backend=backend, pool=pool
        )
        self._calls = StepRunner(
            self._unet,
            slots or memory.CPU_SLOTS,
            latents_channels=int(checkpoint.unet.config.in_channels),
            vae_factor=checkpoint.vae_factor,
            device=self._device,
            backend=backend,
            compiled_ways=compiled_ways,
            kernels=attention.Chooser(attention_kernel),
            pool=pool,
        )
        if slots is None and self._on_gpu:
            self._find_room()
        self._unet.resize(self.slots)
        self._decoder.most_images = self.slots
        self._way: mode.WeightMode = "merged"
        self._merged: mode.LoraKey | None = ()
        self._active: dict[int, SlotJob] = {}
        self._waiting = Waiting(_PATIENCE_FOR_EACH_SLOT * self._calls.slots)
        self._recompiles = 0

    @property
    def model_name(self) -> str:
        return self._checkpoint.name

    @property
    def default_size(self) -> tuple[int, int]:
        return self._preparer.default_size

    @property
    def slots(self) -> int:
        """Images drawn at once; fewer after the memory ran out."""
        return self._calls.slots

    @property
    def capacity(self) -> int:
        return self.slots * _LOOKAHEAD

    @property
    def free(self) -> int:
        return max(0, self.capacity - len(self._waiting.jobs) - len(self._active))

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting.jobs or self._decoder.busy)

    @property
    def lora_lookups(self) -> Mapping[str, int]:
        return self._preparer.lora_lookups

    @property
    def weight_mode(self) -> mode.WeightMode:
        """Of the last tick: each slot's own weights, or the same ones for all."""
        return self._way

    @property
    def recompiles(self) -> int:
        """Graphs compiled that should not have been; 0 unless something is wrong here."""
        return self._recompiles

    def prepare(self, request: contract.ImageRequest) -> SlotPrepared:
        """Checks a request, tokenises its prompts, reads its LoRAs and packs them.

        Raises:
            JobError: this checkpoint cannot draw it, or a LoRA is missing or does not fit.
            TransientError: a LoRA could not be read.
        """
        prepared = self._preparer.prepare(request)
        unet_loras = pack.restrict(prepared.loras, "unet")
        text_loras = pack.restrict(prepared.loras, "text_encoder")
        return SlotPrepared(
            prepared,
            unet_loras,
            self._pack(unet_loras, "unet"),
            self._pack(text_loras, "text_encoder"),
        )

    def admit(self, ticket: int, prepared: contract.Prepared) -> None:
        if not isinstance(prepared, SlotPrepared):
            raise TypeError("prepared by another engine")
        request = prepared.request
        merged = prepared.lora_key if prepared.unet_changes is None else None
        batch_key = BatchKey(request.width, request.height, prepared.tokens, merged, None)
        self._waiting.jobs.append(SlotJob(ticket, prepared, batch_key))

    def tick(self) -> list[contract.Finished]:
        """Fills the free slots and draws one step of all; returns the images that came out.

        Raises:
            NodeError: the GPU itself is broken.
        """
        finished: list[contract.Finished] = []
        failure: errors.FleetError | None = None
        is_memory = False
        try:
            self._refill(finished)
            if self._active:
                self._draw()
                self._stage_ahead(finished)
        except Exception as error:  # whatever it is, it is no reason to stop drawing
            failure, is_memory = (
                engine_errors.classify(error),
                engine_errors.is_out_of_memory(error),
            )
            log.warning(
                "a tick of %d images failed: %s",
                len(self._active),
                failure.message,
                exc_info=True,
                extra={"action": "tick_failed"},
            )
        if failure is not None:
            # Only past the handler are the error's traceback, and the tensors it holds, gone.
            self._recover(finished, failure, is_memory=is_memory)
        self._decoder.run(flush=not self._active)
        self._recompiles = self._calls.recompiles + self._decoder.recompiles
        is_last = not self._active and not self._waiting.jobs
        return finished + self._decoder.collect(wait=is_last and not finished)

    def warm_up(self, width: int, height: int) -> None:
        """Compiles, records and times all that images of a size need; a minute or two on a GPU."""
        if self._active:
            raise RuntimeError("warm up while no image is being drawn")
        began_at = time.monotonic()
        batch_key = self._calls.plain_batch_key((width, height))
        while not self._try_to_warm_up(batch_key):
            self._shrink(self.slots // 2)
        self._decoder.warm_up(self._calls.make_slot_state(batch_key, 1).latents.shape[1:])
        log.info(
            "%d slots of %dx%d are ready after %.0f s; %s",
            self.slots,
            width,
            height,
            time.monotonic() - began_at,
            self._calls.costs,
            extra={"action": "warm"},
        )

    def _try_to_warm_up(self, batch_key: BatchKey) -> bool:
        """Tells whether the memory was enough; one slot has to do."""
        try:
            self._calls.warm_up(batch_key)
        except Exception as error:
            if self.slots == 1 or not engine_errors.is_out_of_memory(error):
                raise
            return False
        return True

    def close(self) -> None:
        self._waiting.jobs.clear()
        self._active.clear()
        self._calls.forget(compile_again=False)
        self._decoder.clear()
        self._stager.close()
        self._merger.close()
        self._unet.close()
        for network in (self._checkpoint.unet, self._checkpoint.vae, self._checkpoint.text_encoder):
            network.to("meta")
        engine_errors.empty_cache(self._device)

    def _pack(self, loras: Sequence[merge.Applied], network: names.Network) -> pack.Packed | None:
        return pack.pack(
            loras,
            network,
            self._groups[network],
            rank_capacity=self._rank_capacity,
            dtype=self._unet.dtype,
            pinned=self._on_gpu,
        )

    # A tick's parts.

    def _refill(self, finished: list[contract.Finished]) -> None:
        """Puts the next jobs into the free slots; those that cannot begin are finished."""
        if not self._active:
            batch_key = self._waiting.next_batch_key()
            if batch_key is None:
                return
            if self._calls.is_to_be_compiled(batch_key):
                self.warm_up(batch_key.width, batch_key.height)
            self._calls.enter(batch_key)
        batch_key = self._calls.batch_key
        if batch_key is None or (self._active and self._calls.is_to_be_compiled(batch_key)):
            return  # compiled once its slots are free
        begun = self._fill(batch_key, finished)
        if not self._active:
            return
        self._choose_way(batch_key)
        for slot in begun:
            self._begin(slot, self._active[slot])
        if self._way == "slots":
            for slot, job in self._active.items():
                if not job.has_weights and job.staged is not None:
                    self._unet.load_slot(slot, job.staged.factors)
                    job.has_weights = True

    def _fill(self, batch_key: BatchKey, finished: list[contract.Finished]) -> list[int]:
        """The slots that have been given a job."""
        begun: list[int] = []
        for slot in range(1 if batch_key.alone is not None else self.slots):
            while slot not in self._active:
                job = self._waiting.take(batch_key, self._merged or None)
                if job is None:
                    return begun
                # In its slot already: should the memory run out, it is with the others.
                self._active[slot] = job
                if failure := self._try_to_stage(job):
                    finished.append(failure)
                    del self._active[slot]
                else:
                    begun.append(slot)
        return begun

    def _choose_way(self, batch_key: BatchKey) -> None:
        jobs = self._active.values()
        if batch_key.merged is not None:
            self._way, to_merge = "merged", batch_key.merged
        else:
            keys = {job.ready.lora_key for job in jobs}
            behind = [job.calls for job in self._waiting.jobs if job.ready.lora_key in keys]
            ahead = mode.ticks_alike([job.calls - job.call for job in jobs], behind, self.slots)
            self._way, to_merge = mode.choose(keys, self._merged, ahead, self._calls.costs)
            if self._calls.lacks(self._way):
                self._way, to_merge = "slots", ()
        if to_merge != self._merged:
            loras = next(job.ready.unet_loras for job in jobs) if to_merge else ()
            self._merged = None  # until all is done: after a failure, nothing counts as merged
            self._activate(loras)
            self._merged = to_merge

    def _activate(self, loras: Sequence[merge.Applied]) -> None:
        """Merges LoRAs into the shared weights, the checkpoint's own below; and times that."""
        if not (self._on_gpu and loras):
            self._merge(loras)
            return
        torch.cuda.synchronize(self._device)
        began_at = time.perf_counter()
        self._merge(loras)
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - began_at
        self._calls.costs = replace(self._calls.costs, merge=seconds)

    def _merge(self, loras: Sequence[merge.Applied]) -> None:
        self._merger.activate(loras)
        if self._compiles:
            self._unet.fold()

    @torch.no_grad()
    def _begin(self, slot: int, job: SlotJob) -> None:
        (state, _), staged = self._calls.current, job.staged
        if staged is None:
            raise RuntimeError("a job begins only once it is staged")
        rows = slice(2 * slot, 2 * slot + 2)
        state.latents[slot].copy_(staged.latents)
        # What an earlier image left there counts nothing, unless it is NaN.
        state.history[:, slot].zero_()
        if state.mask is not None and staged.mask is not None:
            state.mask[rows].copy_(staged.mask)
        factors = staged.factors if self._way == "slots" else {}
        state.context[rows].copy_(self._unet.keys_values.compute(staged.vectors, factors))

    def _draw(self) -> None:
        """One tick of all slots, and the finished ones' way to the decoder."""
        state, feeder = self._calls.current
        inputs = feeder.next_inputs()
        inputs.rows.zero_()
        noisy = False
        for slot, job in self._active.items():
            schedule = job.ready.prepared.schedule
            inputs.rows[slot, :GUIDANCE] = schedule.table[job.call]
            inputs.rows[slot, GUIDANCE] = job.ready.request.cfg_scale
            if schedule.noisy[job.call] and job.staged is not None:
                shape = inputs.noise[slot].shape
                torch.randn(shape, generator=job.staged.generator, out=inputs.noise[slot])
                noisy = True
        feeder.send(inputs, noisy=noisy)
        self._calls.run(self._way, max(self._active) + 1)
        for slot, job in list(self._active.items()):
            job.call += 1
            if job.call == job.calls:
                self._decoder.add(job.ticket, state.latents[slot].clone())
                self._calls.count()
                del self._active[slot]

    def _stage_ahead(self, finished: list[contract.Finished]) -> None:
        soon = [job for job in self._waiting.jobs[: self.slots] if job.staged is None]
        for job in soon[:_STAGED_IN_A_TICK]:
            if failure := self._try_to_stage(job):
                finished.append(failure)
                self._waiting.jobs.remove(job)

    def _try_to_stage(self, job: SlotJob) -> contract.Finished | None:
        """A job whose own prompt or LoRA is at fault fails here, and alone."""
        try:
            self._stager.stage(job)
        except Exception as error:  # whatever it is, it is the outcome of this job
            if engine_errors.is_out_of_memory(error):
                raise
            return contract.Finished(job.ticket, engine_errors.classify(error))
        return None

    # Faults.

    def _recover(
        self, finished: list[contract.Finished], failure: errors.FleetError, *, is_memory: bool
    ) -> None:
        """Sends the images in hand back to their seeds, and makes the next try a safer one."""
        jobs = list(self._active.values()) or self._waiting.jobs[:1]
        compiled = self._calls.is_compiled
        in_call = self.slots if compiled else len(jobs)
        self._active.clear()
        self._waiting.jobs = [job for job in self._waiting.jobs if job not in jobs]
        for job in [*jobs, *self._waiting.jobs]:
            job.restart()
        if compiled and not is_memory:
            log.warning("from now on nothing is compiled", extra={"action": "compile_dropped"})
        elif in_call == 1:
            finished.extend(contract.Finished(job.ticket, failure) for job in jobs)
            jobs = []
        elif is_memory:
            self._shrink(in_call // 2)
        else:
            for job in jobs:
                job.batch_key = job.batch_key._replace(alone=job.ticket)
        self._waiting.put_back(jobs)
        self._calls.forget(compile_again=not compiled or is_memory)
        engine_errors.empty_cache(self._device)

    def _shrink(self, slots: int) -> None:
        log.warning("from now on there are %d slots", slots, extra={"action": "slots_shrunk"})
        self._calls.forget(compile_again=True)
        self._calls.slots = slots
        self._decoder.most_images = slots
        self._unet.resize(slots)
        engine_errors.empty_cache(self._device)

    # Start.

    def _find_room(self) -> None:
        """As many slots as the GPU's memory holds, for images of the checkpoint's own size."""
        width, height = self.default_size
        state = self._calls.make_slot_state(self._calls.plain_batch_key((width, height)), 1)

        @torch.no_grad()
        def run() -> None:
            tick(self._unet, False, *state.tensors)

        @torch.no_grad()
        def decode_one() -> None:
            decoder.decode(self._checkpoint.vae, state.latents)

        held = sum(tensor.nbytes for tensor in state.tensors if tensor is not None)
        room = memory.find_room(self._device, self._unet.bytes_of_a_slot + held, run, decode_one)
        self._calls.slots = room.slots
        self._decoder.slice_pixels = room.decoded * width * height

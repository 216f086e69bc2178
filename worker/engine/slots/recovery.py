"""Restarts in-flight images when a tick fails or the GPU runs out of memory."""

import math
from dataclasses import dataclass

import torch

from imagefleet.errors import FleetError
from imagefleet.telemetry.logs import log
from worker.engine.contract import Finished
from worker.engine.slots import memory
from worker.engine.slots.lane import Lane, Lanes
from worker.engine.slots.parts import Parts
from worker.engine.slots.queue import BatchKey, SlotJob
from worker.engine.slots.step import StepRunner
from worker.engine.slots.weights import Weights


@dataclass(eq=False)
class Recovery:
    """Restarts images from their seeds, and takes less memory; for the engine's thread."""

    _parts: Parts
    _lanes: Lanes
    _runner: StepRunner
    _weights: Weights

    def recover(
        self, lane: Lane, failure: FleetError, *, out_of_memory: bool
    ) -> list[Finished]:
        """Restarts in-flight images from their seeds, in a way that is less likely to fail.

        Out of memory concerns all lanes: networks that no job needs now are dropped; then the
        lanes share one block of weights, then have fewer slots; a single one is not compiled.
        Any other failure concerns its lane alone: it is no longer compiled, then each of its jobs
        is alone. A job that fails alone is finished: these are returned.
        """
        jobs = list(lane.active.values()) or lane.waiting[:1]
        compiled = lane.step is not None and bool(lane.step.compiled)
        in_call = lane.slots if compiled else len(jobs)
        others = len(self._lanes.active) - len(lane.active)
        lane.waiting = [job for job in lane.waiting if job not in jobs]
        lane.active.clear()
        again = []
        if out_of_memory:
            self.restart_all()
            again = self._with_more_memory(lane, jobs, in_call, has_others=others > 0)
        elif compiled and lane.step is not None:
            log.warning(
                "compilation is off from now on: a compiled tick failed",
                action="compile_dropped",
            )
            self._runner.drop(lane.step)
            again = jobs
        elif in_call > 1:
            again = [self._isolate(job) for job in jobs]
        lane.close()
        for job in jobs:
            job.restart()
        for job in reversed(again):
            self._lanes.add(job.batch_key, [job], first=True)
        torch.cuda.empty_cache()
        return [Finished(job.ticket, failure) for job in jobs if not again]

    def restart_all(self) -> None:
        """Frees the tensors of all lanes; their images start again."""
        jobs = []
        for lane in self._lanes:
            jobs += [*lane.active.values(), *lane.waiting]
            lane.active.clear()
            lane.waiting.clear()
            lane.close()
        for job in jobs:
            job.restart()
            self._lanes.add(job.batch_key, [job])
        self._runner.reset()

    def try_to_use_less_memory(self) -> bool:
        """Gives up memory as `use_less_memory` does; a single slot runs uncompiled from then on.

        False if there is nothing left to give up.
        """
        if self._lanes.slots > 1 or self._lanes.blocks > 1:
            self.use_less_memory()
            return True
        return self._stop_compiling()

    def use_less_memory(self) -> None:
        """Restarts all images, with one block of weights for all lanes, or with fewer slots."""
        others_open = any(lane.block and lane.step for lane in self._lanes)
        self.restart_all()
        if others_open:
            self._share_block()
        else:
            self._shrink(memory.fewer(self._lanes.slots))

    def _with_more_memory(
        self, failed: Lane, jobs: list[SlotJob], in_call: int, *, has_others: bool
    ) -> list[SlotJob]:
        """Frees memory after a call of *in_call* images had too little; what may run again."""
        # The ControlNets and other checkpoints of all jobs that are here.
        keys = [
            failed.batch_key,
            *(lane.batch_key for lane in self._lanes if lane.held),
        ]
        needed = {identity for key in keys for identity in key.controls}
        needed |= {key.checkpoint for key in keys if key.checkpoint is not None}
        if any(cache.keep_only(needed) for cache in self._parts.caches.known):
            return jobs
        if self._lanes.blocks > 1:
            self._share_block()
        elif in_call > 1:
            slots = math.ceil(self._lanes.slots * memory.fewer(in_call) / failed.slots)
            self._shrink(min(slots, self._lanes.slots - 1))
        elif has_others and failed.batch_key.isolated is None:
            return [self._isolate(job) for job in jobs]
        elif (
            failed.batch_key.controls or failed.batch_key.checkpoint
        ) and self._lanes.slots > 1:
            # A ControlNet or another checkpoint takes memory beside the slots' weights.
            self._shrink(memory.fewer(self._lanes.slots))
        elif not self._stop_compiling(failed.batch_key):
            return []
        return jobs

    def _stop_compiling(self, failed: BatchKey | None = None) -> bool:
        """Frees what is compiled, which keeps memory of its own; False if nothing may be.

        For good, or, after an image larger than the native size has *failed*, until it is done.
        """
        if not self._runner.may_compile:
            return False
        if failed is not None and failed.width * failed.height > math.prod(
            self._parts.model.default_size
        ):
            self._runner.paused_for = failed
            until = f"until the image of {failed.width}x{failed.height} is done"
        else:
            self._runner.give_up()
            until = "from now on"
        log.warning(
            f"out of memory: compilation is off {until}", action="compile_dropped"
        )
        self.restart_all()
        self._parts.decoder.forget_compiled()
        torch.cuda.empty_cache()
        return True

    def _isolate(self, job: SlotJob) -> SlotJob:
        """Gives a job a lane of its own: it may be what breaks the calls of others."""
        job.batch_key = job.batch_key._replace(isolated=job.ticket)
        return job

    def _share_block(self) -> None:
        log.warning(
            "out of memory: all sizes share the slots' weights from now on",
            action="blocks_dropped",
        )
        self._lanes.blocks = 1
        self._parts.stager.room_bytes = self._parts.unet.slot_bytes
        self._runner.max_compiled = self._lanes.max_open - 1
        self._resize()

    def _shrink(self, slots: int) -> None:
        log.warning(f"out of memory: reduced to {slots} slots", action="slots_shrunk")
        self._runner.slots = self._lanes.slots = self._parts.decoder.max_images = slots
        self._resize()

    def _resize(self) -> None:
        """Allocates one block of weights anew; all lanes are closed."""
        for lane in self._lanes:
            lane.slots = self._lanes.slots_of(lane.batch_key)
        self._weights.resize([0])
        self._parts.decoder.forget_compiled()
        torch.cuda.empty_cache()  # the memory of CUDA graphs too, which nothing else could use
        self._weights.resize(self._lanes.block_slots)

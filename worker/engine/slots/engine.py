"""The slot engine: each tick is one UNet call and one sampler step for every image of a lane.

Each slot holds one image with its own latents, schedule, guidance scale, prompts and LoRAs, and is
refilled the tick after its image is done, so no image waits for another to finish. Images of
another size or with far longer prompts are in another lane; lanes take turns (`lane.py`). The host
tracks every slot's step, so a tick reads nothing back from the GPU.
"""

import functools
import gc
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from imagefleet.errors import FleetError, JobCancelled, JobError
from imagefleet.telemetry.logs import log
from worker.engine import contract, sampler
from worker.engine import errors as engine_errors
from worker.engine.contract import Finished, ImageRequest, Result
from worker.engine.families.table import Model
from worker.engine.files.network_cache import KEPT_BYTES
from worker.engine.lora.merge import NO_CHANGES
from worker.engine.networks.convolution import USUAL_RANK
from worker.engine.passes.upscaling import PreparedUpscale
from worker.engine.self_check import SelfCheck
from worker.engine.slots import memory, weights
from worker.engine.slots.compiling import Compilation
from worker.engine.slots.lane import MAX_LANES, Lane, Lanes
from worker.engine.slots.memory import Savings, WeightMode
from worker.engine.slots.parts import Parts
from worker.engine.slots.prepare import PreparedRequest
from worker.engine.slots.queue import BatchKey, SlotJob
from worker.engine.slots.recovery import Recovery
from worker.engine.slots.step import Step, StepRunner, tick

#: Younger jobs per slot that may overtake one with other LoRAs, while theirs are merged for all.
_OVERTAKES_PER_SLOT = 6


class SlotEngine:
    """A `contract.Engine` that draws several images at once, each at its own step."""

    def __init__(self, parts: Parts) -> None:
        model = parts.model
        settings = parts.settings
        self.model_name = model.name
        self.family = model.family.slug
        self.is_unguided = settings.is_unguided
        self.is_int8 = model.is_int8
        self.text_encoder = model.states_encoder
        self.default_size = model.default_size
        self.lora_lookups = parts.preparer.lora_lookups
        self.find_embeddings = parts.preparer.find_embeddings
        #: The last tick's.
        self.weight_mode: WeightMode = "shared"
        #: Rows of the UNet's calls that images took.
        self.unet_rows = 0
        #: Sum of these rows' pixels: the work of images of unlike sizes.
        self.unet_row_pixels = 0
        #: Rows that images' passes had left when they were dropped.
        self.unet_rows_saved = 0
        self.checkpoint: Model = model
        self._packages = settings.packages
        self._unet = parts.unet
        self._preparer = parts.preparer
        self._stager = parts.stager
        self._caches = parts.caches
        self._merger = parts.merger
        self._decoder = parts.decoder
        self._device = parts.unet.device
        self._on_gpu = self._device.type == "cuda"
        #: Of the engine's own thread, for a job that starts; a guess until a GPU draws.
        self._start_seconds = 0.001
        self._enlarged: list[Finished] = []
        self._runner = StepRunner(parts, settings.slots or memory.CPU_SLOTS)
        self._weights = weights.Weights(parts, self._runner)
        self.self_check = self._make_self_check()
        blocks = self._fit_memory(parts) if self._on_gpu else 1
        self._lanes = Lanes(
            self.slots,
            min(settings.blocks or blocks, MAX_LANES),
            self._runner.native,
            _OVERTAKES_PER_SLOT * self.slots,
        )
        self._runner.max_compiled = self._lanes.max_open - 1
        self._weights.resize(self._lanes.block_slots)
        self._decoder.max_images = self.slots
        self._decoder.pool = self._runner.pool
        self._recovery = Recovery(parts, self._lanes, self._runner, self._weights)

        self._compilation = Compilation(
            parts,
            self._runner,
            self._lanes,
            self._open_lane,
            self._recovery.use_less_memory,
        )

    @property
    def graphs(self) -> Mapping[str, int]:
        """Graphs that run compiled, by where their kernels are from; none without a compiler."""
        packages = self._packages
        return {} if packages is None else packages.graphs

    @property
    def is_compiling(self) -> bool:
        """True while something is compiled beside the ticks."""
        return self._compilation.is_under_way

    @property
    def savings(self) -> Savings:
        return Savings(
            self._unet.weights,
            self._decoder.is_striped,
            self.checkpoint.has_text_on_cpu,
        )

    @property
    def slots(self) -> int:
        """Images of two rows drawn in one call; reduced when the memory runs out."""
        return self._runner.slots

    def slots_for(self, request: ImageRequest) -> int:
        """Images like this one drawn in one call."""
        return self._lanes.slots_of(BatchKey.of(self._preparer.prepare(request)))

    @property
    def capacity(self) -> int:
        return self._lanes.jobs + self.free

    @property
    def free(self) -> int:
        return self._lanes.free

    @property
    def busy(self) -> bool:
        return bool(
            self._lanes.jobs
            or self._decoder.busy
            or self._enlarged
            or self._compilation.is_due
        )

    def prepare(self, request: ImageRequest) -> PreparedRequest | PreparedUpscale:
        """See `Preparer.prepare` and `UpscalerCache.prepare`."""
        if request.decoder == "TAESD" and not self._decoder.has_tiny:
            raise JobError(
                "sd_vae_decode_method is TAESD, and this worker has none (--taesd): leave it out of"
                " the job"
            )
        if request.upscale is not None:
            return self._preparer.upscalers.prepare(request)
        return self._preparer.prepare(request)

    def admit(
        self,
        ticket: int,
        prepared: contract.PreparedRequest,
        *,
        is_urgent: bool = False,
    ) -> None:
        if isinstance(prepared, PreparedUpscale):
            self._enlarged.append(Finished(ticket, prepared.pixels))
            return
        if not isinstance(prepared, PreparedRequest):
            raise TypeError("prepared by another engine")
        self._add(SlotJob(ticket, prepared, BatchKey.of(prepared), is_urgent))

    def tick(self) -> list[Finished]:
        """Fills a lane's free slots and runs one step of it; raises NodeError for a broken GPU."""
        self._compilation.advance()
        finished = self._enlarged
        self._enlarged = []
        failure: FleetError | None = None
        out_of_memory = False
        lane = self._lanes.next()
        try:
            if lane is not None:
                self._stage_ahead()
                self._refill(lane, finished)
                if lane.active:
                    self._step(lane)
                if self._weights.loads_while_decoding:
                    self._refill(lane, finished, waits=False)
                self._stage_ahead()
        except Exception as error:  # noqa: BLE001 - handled below, NodeError raised here
            failure = engine_errors.classify(error)
            out_of_memory = engine_errors.is_out_of_memory(error)
            images = len(lane.active) if lane else 0
            log.warning(
                f"a tick of {images} images failed: {failure.message}",
                exc_info=True,
                action="tick_failed",
            )
        if failure is not None and lane is not None:
            # Outside the handler, where the error's traceback no longer holds any tensors.
            finished += self._recovery.recover(
                lane, failure, out_of_memory=out_of_memory
            )
        drawing = sum(1 for each in self._lanes if each.active)
        self._decoder.run(
            flush=not drawing,
            lanes=drawing,
            free_memory=self._recovery.try_to_use_less_memory,
        )
        finished += self._decoder.collect(wait=not self._lanes.jobs and not finished)
        return finished

    def warm_up(self, request: ImageRequest | None = None) -> None:
        """Compiles, records and times all that requests like this one need, or ordinary ones.

        That is its size, prompts' length and ControlNets; a minute or two on a GPU. Ordinary ones
        of one row may have LoRAs of their own or not.
        """
        native = self._runner.native
        prepare = self._preparer.prepare
        keys = (native, native._replace(is_plain=False))
        for key in (
            dict.fromkeys(keys) if request is None else [BatchKey.of(prepare(request))]
        ):
            self._compilation.run(key)

    def compile_in_background(self) -> None:
        """Has what most jobs need compiled while images are drawn."""
        self._compilation.begin()

    def call(self, function: Callable[[], Result]) -> Result:
        while True:
            try:
                return function()
            except Exception as error:
                failure = engine_errors.classify(error)
                if not engine_errors.is_out_of_memory(error):
                    raise
            # Outside the handler, where the error's traceback no longer holds any tensors.
            if not self._recovery.try_to_use_less_memory():
                raise failure

    def take_weights(self, other: Model) -> bool:
        """Draws with another checkpoint from now on, with all that is compiled.

        *other* is on the CPU, and alike (`weights.is_alike`). False, and nothing is changed, while
        there are jobs.
        """
        if self._lanes.jobs or self._decoder.busy:
            return False
        self._weights.use(None)
        self.checkpoint = self.checkpoint.exchange(other)
        self.model_name = other.name
        self._weights.renew()
        self._stager.forget()
        self._preparer.use(self.checkpoint)
        self.self_check = self._make_self_check()
        return True

    def close(self) -> None:
        self._compilation.stop()
        self._lanes.clear()
        self._runner.reset()
        self._decoder.clear()
        self._stager.close()
        for cache in self._caches.known:
            cache.close()
        self._merger.reset()
        self._unet.close()
        for network in self.checkpoint.networks.values():
            network.to("meta")
        gc.unfreeze()  # what was compiled is garbage from now on
        torch.cuda.empty_cache()

    def _make_self_check(self) -> SelfCheck | None:
        model = self.checkpoint
        # Images that enlarge the same one may be alike, whatever their seeds and LoRAs.
        if model.weight_sums is None or model.family.enlarges_image:
            return None
        computing = {**model.networks, model.family.backbone: self._unet}
        lock = self._stager.text_encoder_lock
        return SelfCheck(
            model, self._merger, computing, lock, self._weights.without_own
        )

    def _add(self, job: SlotJob) -> None:
        job.batch_key = self._runner.place(job, is_first=not self._lanes.jobs)
        self._lanes.add(job.batch_key, [job])

    def _open_lane(self, batch_key: BatchKey) -> tuple[Lane, Step]:
        lane = self._lanes.lane_of(batch_key)
        return lane, self._open(lane)

    def _open(self, lane: Lane) -> Step:
        if lane.step is None:
            unet = self._weights.unet_of(lane.batch_key.checkpoint)
            if unet is self._unet:
                lane.block = self._lanes.choose_block(lane)
                unet.use_block(lane.block, lane.slots)
            networks = list(map(self._caches.control_nets.get, lane.batch_key.controls))
            lane.step = self._runner.make_step(
                lane.batch_key, lane.slots, unet, networks
            )
        return lane.step

    def _refill(
        self, lane: Lane, finished: list[Finished], *, waits: bool = True
    ) -> None:
        """Moves the next jobs into a lane's free slots; those that cannot start are finished.

        Those that their estimates have dropped leave first. *waits* for the first that is still
        being staged, if no slot draws.
        """
        step = self._open(lane)
        for slot, job in list(lane.active.items()):
            if job.prepared.request.is_stopped:
                del lane.active[slot]
                calls = range(job.call, job.calls)
                self.unet_rows_saved += sum(map(job.prepared.rows, calls))
                finished.append(Finished(job.ticket, JobCancelled()))
        started = self._fill(lane, waits=waits)
        if not lane.active:
            return
        self._weights.use(lane.batch_key.checkpoint)
        self._weights.choose_mode(lane, step, self._lanes.active)
        if lane.weight_mode != "shared":
            self._weights.make_room(lane, self._lanes.held)
        self.weight_mode = lane.weight_mode
        # Their LoRAs are on the device at the same time.
        for slot in started:
            if failure := self._stager.try_to_stage(lane.active[slot]):
                finished.append(failure)
                del lane.active[slot]
        began_at = time.perf_counter()
        with self._preparer.paused():
            for slot in started:
                if slot in lane.active:
                    self._start(lane, step, slot)
            self._weights.load(lane)
        if started and self._on_gpu:
            seconds = (time.perf_counter() - began_at) / len(started)
            # A start that had to wait, as for more memory, says little of the next ones.
            self._start_seconds = min(seconds, 1.5 * self._start_seconds)

    def _fill(self, lane: Lane, *, waits: bool) -> list[int]:
        """Assigns jobs to the free slots; returns these slots.

        No more than have room for their LoRAs, or than start within a tick, during which a GPU does
        not wait for them; and none that is still being staged once the lane is half full without.
        They start in the next ticks, and end in other ones from then on, so that LoRAs are staged
        while the slots draw.
        """
        tick_seconds = self._runner.costs.seconds(lane.weight_mode)
        free = [slot for slot in range(lane.slots) if slot not in lane.active]
        changing = self._weights.changing_slots(lane)
        started: dict[int, SlotJob] = {}
        ready = len(lane.active)
        while free and self._lanes.takes_jobs(lane):
            may_change = free[0] < changing
            job = lane.take(self._weights.preferred, may_change=may_change)
            if job is None:
                break
            starting = [*started.values(), job]
            has_room = len(self._stager.first_with_room(starting)) > len(started)
            # Not on a CPU, where a tick takes longer than staging a job.
            may_wait = not waits or (self._on_gpu and 2 * ready >= lane.slots)
            has_time = len(started) * self._start_seconds <= tick_seconds
            if not (has_room and has_time) or (may_wait and job.is_being_staged):
                lane.waiting.insert(0, job)
                break
            slot = free[0]
            if not job.changes_convolutions:
                # The first slots are for those that do, while there are others.
                slot = next((each for each in free if each >= changing), slot)
            free.remove(slot)
            started[slot] = job
            ready += not job.is_being_staged
        lane.active |= started
        return list(started)

    @torch.no_grad()
    def _start(self, lane: Lane, step: Step, slot: int) -> None:
        """Copies a staged job into its slot."""
        state = step.state
        staged = lane.active[slot].data
        state.latents[slot].copy_(staged.latents)
        kept, original = staged.inpainting or (None, None)
        for held, own in (
            (state.history[:, slot], staged.history),
            (state.kept[slot], kept),
            (state.original[slot], original),
        ):
            if own is None:
                # An earlier image's numbers have weight 0, but 0 times NaN would still be NaN.
                held.zero_()
            else:
                held.copy_(own)
        if state.conditioning is not None and staged.conditioning is not None:
            state.conditioning[slot].copy_(staged.conditioning)
        self._write_texts(lane, step, slot)

    @torch.no_grad()
    def _write_texts(self, lane: Lane, step: Step, slot: int) -> None:
        """Sets what the slot's next call takes of its job's texts."""
        state = step.state
        job = lane.active[slot]
        staged = job.data
        count = state.slot_rows
        rows = slice(count * slot, count * (slot + 1))
        at = job.prepared.texts_at(job.call)[:count]
        own = [text for text in at if text < len(staged.vectors)]
        # An image of one row beside those of two: both are its prompt's.
        at = [*own, *own[:1] * (count - len(own))]

        def of_rows(each: Tensor) -> Tensor:
            # An index would be a tensor, whose copy to the device the host waits for.
            return torch.stack([each[text] for text in at])

        vectors = of_rows(staged.vectors)
        if state.mask is not None and staged.mask is not None:
            state.mask[rows].copy_(of_rows(staged.mask))
        added = staged.added
        embedded = None
        if added is not None and len(added[0]) > 1:  # not the level of an image's noise
            added = tuple(map(of_rows, added))
        if state.added is not None:
            embedded = state.added[
                state.added_rows * slot : state.added_rows * (slot + 1)
            ]
        is_shared = lane.weight_mode == "shared"
        changes = {} if is_shared else self._stager.changes_of(job).stacked
        step.unet.compute_prompt(vectors, added, changes, state.context[rows], embedded)
        for control, hint in zip(step.controls, staged.hints, strict=True):
            control.fill(slot, hint, vectors, added)

    def _step(self, lane: Lane) -> None:
        """Runs one step of a lane's slots and passes finished latents to the decoder."""
        step = self._open(lane)
        rows, noise = next(step.feeder.inputs)
        # In numpy: each of torch's calls lets go of the interpreter, and waits for it again.
        table = rows.numpy()
        table.fill(0)
        noisy = False
        for slot, job in lane.active.items():
            schedule = job.prepared.schedule
            row = table[slot]
            columns = schedule.table.shape[1]
            row[:columns] = schedule.table.numpy()[job.call]
            scales = job.prepared.scales(job.call)
            row[columns : columns + len(scales)] = scales
            columns += lane.batch_key.slot_rows
            for at, control in enumerate(job.prepared.controls, columns):
                row[at] = control.weights[job.call]
            if job.prepared.changes_texts(job.call):
                self._write_texts(lane, step, slot)
            if schedule.noisy[job.call]:
                job.data.noise.fill(noise[slot])
                noisy = True
        step.feeder.send(rows, noise if noisy else None)
        self._weights.finish_loading()
        self._runner.run(step, lane.weight_mode, max(lane.active) + 1)
        self._weights.note_step()
        key = lane.batch_key
        drawn_rows = sum(
            min(job.prepared.rows(job.call), key.slot_rows)
            for job in lane.active.values()
        )
        self.unet_rows += drawn_rows
        self.unet_row_pixels += drawn_rows * key.width * key.height
        for slot, job in list(lane.active.items()):
            job.call += 1
            if job.is_halfway:
                row = job.prepared.schedule.table[job.call - 1]
                estimate = sampler.image_of(row, step.state.history[:, slot])
                self._decoder.add(
                    job.ticket, job.data.with_kept(estimate), is_estimate=True
                )
            if job.call == job.calls:
                job.extend(step.state.latents[slot], step.state.history[:, slot])
            is_done = job.call == job.calls
            if not is_done and not self._weights.may_move(lane, job):
                continue
            del lane.active[slot]
            latents = step.state.latents[slot].clone()
            history = step.state.history[:, slot]
            if is_done:
                self._end_pass(job, latents, history)
                continue
            # On to the lane whose slots have the rows of its next call.
            job.staged = replace(job.data, latents=latents, history=history.clone())
            job.has_weights = False
            following = job.batch_key.at(job.prepared, job.call)
            job.batch_key = self._runner.lane_key(following)
            self._lanes.add(job.batch_key, [job], first=True)

    def _end_pass(self, job: SlotJob, latents: Tensor, history: Tensor) -> None:
        """Passes latents on: to the decoder, or to the lane of the job's next pass."""
        staged = job.data
        if job.prepared.ends is None:
            latents = staged.with_kept(latents)
        if (following := job.prepared.next_pass) is None:
            named = staged.coder and staged.coder.vae
            self._decoder.add(job.ticket, latents, job.prepared.request.decoder, named)
            return
        drawn_with = replace(
            staged,
            latents=latents,
            history=history.clone(),
            loras=None,
            changes=NO_CHANGES,
        )
        # Still alone if the first pass was.
        batch_key = BatchKey.of(following)._replace(isolated=job.batch_key.isolated)
        going_on = SlotJob(
            job.ticket, following, batch_key, job.is_urgent, first_pass=drawn_with
        )
        if self._on_gpu:
            going_on.drawn = torch.cuda.current_stream().record_event()
        going_on.call = following.begins
        self._add(going_on)

    def _stage_ahead(self) -> None:
        """Begins to stage the next jobs, as far as there is room for their LoRAs.

        Each lane's, for all of its slots: lanes that take turns also end their images together.
        """
        lanes = sorted(self._lanes, key=self._lanes.urgency, reverse=True)
        waiting = [lane.waiting[: lane.slots] for lane in lanes]
        nexts = itertools.chain.from_iterable(itertools.zip_longest(*waiting))
        self._stager.begin_within(list(filter(None, nexts)))

    @torch.no_grad()
    def _fit_memory(self, parts: Parts) -> int:
        """Fits the GPU's memory for images of the model's native size; returns the blocks."""
        width, height = self.default_size
        family = self.checkpoint.family
        rows = 1 if family.is_distilled else 2
        most = self._runner.native._replace(slot_rows=rows, is_plain=False)
        state = self._runner.make_slot_state(most, 1, self._unet)
        state_bytes = sum(each.nbytes for each in state if isinstance(each, Tensor))
        decode = functools.partial(self._decoder.decode, state.latents)
        if family.has_large_layers:
            self._decoder.is_striped = memory.is_too_large(
                self._device, decode, self._unet.weights
            )
        fit = memory.fit(
            self._device,
            self._unet.slot_bytes + state_bytes,
            lambda: tick(self._unet, "shared", state, ()),
            decode,
            parts.settings.slots,
            lane_bytes=state_bytes,
            change_bytes=self._unet.changes.more_bytes(USUAL_RANK),
            is_compiled=self._runner.may_compile,
            weights=self._unet.weights,
            must_fit=family.must_fit,
            most_slots=family.most_slots,
        )
        self._runner.slots = fit.slots
        self._decoder.slice_pixels = fit.decoded * width * height
        self._stager.room_bytes = fit.staged_bytes
        for cache in self._caches.known:
            cache.kept_bytes = min(KEPT_BYTES, fit.staged_bytes / 4)
        self._unet.temporary_bytes = max(
            fit.temporary_bytes, self._unet.temporary_bytes
        )
        return fit.blocks

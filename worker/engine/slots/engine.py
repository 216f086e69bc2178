"""The slot engine: each tick is one UNet call and one sampler step for every image of a lane.

Each slot holds one image with its own latents, schedule, guidance scale, prompts and LoRAs, and is
refilled the tick after its image is done, so no image waits for another to finish. Images of
another size or with far longer prompts are in another lane; lanes take turns (`lane.py`). The host
tracks every slot's step, so a tick reads nothing back from the GPU.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence

import torch

from imagefleet import errors
from imagefleet.job.prompt import Prompt
from worker.engine import contract, decoder, sampler
from worker.engine import errors as engine_errors
from worker.engine.checkpoint import Checkpoint
from worker.engine.control.held import KEPT_BYTES, ControlNets
from worker.engine.kernels import layers
from worker.engine.kernels.background import Around, nothing_around
from worker.engine.kernels.compile import GraphPool
from worker.engine.lora import merge
from worker.engine.recovery import Recovery
from worker.engine.self_check import SelfCheck
from worker.engine.slots import linear, memory, prepare, queue, staging, weights
from worker.engine.slots.compiling import Compilation
from worker.engine.slots.lane import MAX_LANES, Lane, Lanes
from worker.engine.slots.prepare import PLAIN_TOKENS, PreparedRequest
from worker.engine.slots.queue import BatchKey, FirstPass, SlotJob
from worker.engine.slots.staging import Stager
from worker.engine.slots.step import GUIDANCE, Step, StepRunner, tick
from worker.engine.slots.unet import SlotUnet
from worker.engine.upscalers.beside import BesideTicks, PreparedUpscale

log = logging.getLogger(__name__)

#: Slots of low rank have room for LoRAs of it from the start; for others their memory grows.
_USUAL_RANK = 32

#: Younger jobs per slot that may overtake one with other LoRAs, while theirs are merged for all.
_OVERTAKES_PER_SLOT = 6


class SlotEngine:
    """A `contract.Engine` that draws *slots* images at once, each at its own step."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        slots: int | None = None,
        *,
        blocks: int | None = None,
        slot_weights: memory.SlotWeights | None = None,
        backend: str | None = None,
        compiled_modes: Sequence[queue.WeightMode] = queue.WEIGHT_MODES,
        lora_cache_bytes: int = prepare.LORA_CACHE_BYTES,
    ) -> None:
        """*slots* None fits them to the GPU's memory.

        *blocks*: how many lanes may have slots' weights of their own; None fits them as well.
        *slot_weights*: how slots hold LoRAs, None decides by the memory; "reloaded" is one slot's.
        *backend* is torch.compile's, None for no compilation; the UNet is compiled for the
        *compiled_modes*, in this order.
        """
        self.model_name = checkpoint.name
        self.family = checkpoint.family.slug
        self.text_encoder: str | None = None
        self.default_size = checkpoint.default_size
        self.weight_mode: queue.WeightMode = "shared"
        """The last tick's."""
        self.recompiles = 0
        """Graphs compiled after the warm-up; above 0 is a bug."""
        self._has_drawn_job = False
        self._checkpoint = checkpoint
        self._device: torch.device = checkpoint.unet.device
        self._on_gpu = self._device.type == "cuda"
        # Not on a CPU, where a tick takes longer than staging a job.
        self._draws_while_staging = self._on_gpu
        if backend is not None:
            layers.replace_group_norms(checkpoint.unet)
            layers.replace_group_norms(checkpoint.vae)
            layers.replace_upsamplers(checkpoint.vae)
        self._control_nets = ControlNets(checkpoint.unet, is_compiled=backend is not None)
        self._stager = Stager(checkpoint, self._control_nets)
        is_large = checkpoint.family.has_large_layers
        layer_bytes = linear.transformer_bytes(checkpoint.unet)
        if slot_weights is None:
            choose = memory.choose_weights
            slot_weights = choose(self._device, layer_bytes, slots, is_large=is_large)
        if slot_weights == "reloaded":
            slots, compiled_modes = 1, ("per_slot",)
        keeps_on_cpu = is_large and memory.has_no_room_for_originals(self._device, layer_bytes)
        self._merger = merge.Merger(
            checkpoint.unet, checkpoint.text_encoders, keeps_on_cpu=keeps_on_cpu
        )
        self._unet = SlotUnet(checkpoint.unet, slot_weights)
        self._unet.changes.grow_for_transformers(_USUAL_RANK)
        if backend is not None:
            self._unet.fold()
        self._preparer = prepare.RequestPreparer(
            checkpoint,
            {"unet": self._unet.groups, **linear.groups_of(checkpoint.text_encoders)},
            self._control_nets,
            convolutions=self._unet.changes.groups,
            lora_cache_bytes=lora_cache_bytes,
        )
        self._upscales = BesideTicks(self._preparer.upscalers, self._device)
        self.lora_lookups = self._preparer.lora_lookups
        pool = GraphPool(self._device) if self._on_gpu else None
        self._decoder = decoder.Decoder(checkpoint.vae, backend=backend, pool=pool)
        self._runner = StepRunner(
            self._unet,
            slots or memory.CPU_SLOTS,
            checkpoint=checkpoint,
            backend=backend,
            compiled_modes=compiled_modes,
            pool=pool,
            costs=queue.Costs(merge_seconds=1.0) if keeps_on_cpu else queue.Costs(),
        )
        self._weights = weights.Weights(
            self._unet, self._merger, self._runner, self._stager, folds=backend is not None
        )
        self.self_check = self._make_self_check()
        fitting = self._fit_memory(slots) if self._on_gpu else 1
        max_overtakes = _OVERTAKES_PER_SLOT * self.slots
        self._lanes = Lanes(self.slots, min(blocks or fitting, MAX_LANES), max_overtakes)
        self._runner.max_compiled = self._lanes.max_open - 1
        self._weights.resize(self.slots)
        self._decoder.max_images = self.slots
        self._recovery = Recovery(
            self._unet,
            self._lanes,
            self._runner,
            self._weights,
            self._decoder,
            self._stager,
            self._control_nets,
            native=self.default_size,
        )
        self._decoder.free_memory = self._recovery.try_to_use_less_memory
        self._compilation = Compilation(
            self._unet,
            self._runner,
            self._decoder,
            self._lanes,
            first=self._runner.batch_key(*self.default_size),
            open_lane=self._open_lane,
            use_less_memory=self._recovery.use_less_memory,
        )

    @property
    def is_compiling(self) -> bool:
        """True while something is compiled beside the ticks."""
        return self._compilation.is_under_way

    @property
    def savings(self) -> memory.Savings:
        on_cpu = self._checkpoint.has_text_on_cpu
        return memory.Savings(self._unet.weights, self._decoder.is_striped, on_cpu)

    @property
    def slots(self) -> int:
        """Images drawn in one call; reduced when the memory runs out."""
        return self._runner.slots

    @property
    def capacity(self) -> int:
        return self._lanes.jobs + len(self._upscales.begun) + self.free

    @property
    def free(self) -> int:
        return max(0, self._lanes.free - len(self._upscales.begun))

    @property
    def busy(self) -> bool:
        draws = self._lanes.jobs or self._decoder.busy
        return bool(draws or self._upscales.begun or self._compilation.is_due)

    def find_embeddings(
        self, prompts: Iterable[Prompt | str], names: Collection[str]
    ) -> tuple[str, ...]:
        """See `text.Tokenizer.find_names`."""
        return self._preparer.tokenizer.find_names(prompts, names)

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest | PreparedUpscale:
        """See `RequestPreparer.prepare` and `BesideTicks.prepare`."""
        if request.upscale is not None:
            return self._upscales.prepare(request)
        return self._preparer.prepare(request)

    def admit(
        self, ticket: int, prepared: contract.PreparedRequest, *, urgent: bool = False
    ) -> None:
        if isinstance(prepared, PreparedUpscale):
            self._upscales.add(ticket, prepared)
            return
        if not isinstance(prepared, PreparedRequest):
            raise TypeError("prepared by another engine")
        self._add(SlotJob(ticket, prepared, BatchKey.of(prepared), urgent))

    def tick(self) -> list[contract.Finished]:
        """Fills the free slots of a lane and runs one step of it; returns the finished images.

        Raises:
            NodeError: the GPU itself is broken.
        """
        self._compilation.advance()
        finished: list[contract.Finished] = []
        failure: errors.FleetError | None = None
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
        except Exception as error:  # any failure is handled below; NodeError is raised here
            failure = engine_errors.classify(error)
            out_of_memory = engine_errors.is_out_of_memory(error)
            log.warning(
                "a tick of %d images failed: %s",
                len(lane.active) if lane else 0,
                failure.message,
                exc_info=True,
                extra={"action": "tick_failed"},
            )
        if failure is not None and lane is not None:
            # Outside the handler, where the error's traceback no longer holds any tensors.
            finished += self._recovery.recover(lane, failure, out_of_memory=out_of_memory)
        drawing = sum(1 for each in self._lanes if each.active)
        self._decoder.run(flush=not drawing, lanes=drawing)
        self.recompiles = self._runner.recompiles + self._decoder.recompiles
        finished += self._decoder.collect(wait=not self._lanes.jobs and not finished)
        if finished and self._has_drawn_job:
            self._compilation.begin()
        if self._upscales.begun:
            draws = self._lanes.jobs or self._decoder.busy
            finished += self._upscales.collect(wait=not (draws or finished))
        return finished

    def warm_up(self, width: int, height: int, tokens: int = PLAIN_TOKENS) -> None:
        """Compiles, records and times all that a size needs; a minute or two on a GPU.

        *tokens* of the context: more than those of ordinary prompts for the long ones.
        """
        self._compilation.run(self._runner.batch_key(width, height, tokens))

    def warm_up_like(self, request: contract.ImageRequest) -> None:
        """The same for requests with the size, prompts' length and ControlNets of this one."""
        self._compilation.run(BatchKey.of(self._preparer.prepare(request)))

    def compile_in_background(self, around: Around = nothing_around) -> None:
        """The same for the native size while images are drawn, soon after the first one.

        *around* is entered while something is compiled, later sizes included.
        """
        self._compilation.begin_soon(around)

    def finish_compiling(self) -> None:
        """Waits until all that is frequent or asked for by now is compiled."""
        self._compilation.finish()

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def take_weights(self, other: Checkpoint) -> bool:
        """Draws with another checkpoint from now on, with all that is compiled.

        *other* is on the CPU, and alike (`weights.is_alike`). False, and nothing is changed, while
        there are jobs.
        """
        if self._lanes.jobs or self._decoder.busy or self._upscales.begun:
            return False
        self._checkpoint = weights.exchange(self._checkpoint, other)
        self.model_name = other.name
        self._weights.renew()
        self._stager.forget()
        self._preparer.use(self._checkpoint)
        self.self_check = self._make_self_check()
        return True

    def close(self) -> None:
        self._compilation.stop()
        self._lanes.clear()
        self._runner.reset()
        self._decoder.clear()
        self._stager.close()
        self._upscales.close()
        self._control_nets.close()
        self._merger.close()
        self._unet.close()
        for network in self._checkpoint.networks.values():
            network.to("meta")
        gc.unfreeze()  # what was compiled is garbage from now on
        torch.cuda.empty_cache()

    def _make_self_check(self) -> SelfCheck | None:
        # Images that enlarge the same one may be alike, whatever their seeds and LoRAs.
        if self._checkpoint.family.enlarges_image:
            return None
        computing = {"unet": self._unet, "vae": self._checkpoint.vae}
        lock = self._stager.text_encoder_lock
        own = self._weights.without_own
        return SelfCheck(self._checkpoint, self._merger, computing, lock, own)

    # The parts of a tick.

    def _add(self, job: SlotJob) -> None:
        lane = self._lanes.lane_of(job.batch_key, self.default_size)
        self._lanes.add(lane, [job], first=job.urgent)

    def _open_lane(self, batch_key: BatchKey) -> Lane:
        lane = self._lanes.lane_of(batch_key, self.default_size)
        self._open(lane)
        return lane

    def _open(self, lane: Lane) -> Step:
        if lane.step is None:
            lane.block = self._lanes.choose_block()
            self._unet.use_block(lane.block)
            networks = [self._control_nets.get(each) for each in lane.batch_key.controls]
            lane.step = self._runner.make_step(lane.batch_key, lane.slots, networks)
        return lane.step

    def _refill(self, lane: Lane, finished: list[contract.Finished], *, waits: bool = True) -> None:
        """Moves the next jobs into a lane's free slots; those that cannot start are finished.

        *waits* for the first that is still being staged, if no slot draws.
        """
        step = self._open(lane)
        started = self._fill(lane, waits=waits)
        if not lane.active:
            return
        self._weights.choose_mode(lane, step, self._lanes.active)
        if lane.weight_mode != "shared":
            self._weights.make_room(lane, self._lanes.active)
        self.weight_mode = lane.weight_mode
        self._start_together(lane, step, started, finished)

    def _fill(self, lane: Lane, *, waits: bool) -> list[int]:
        """Assigns jobs to the free slots; returns these slots.

        No more than have room for their LoRAs, and none that is still being staged once the lane is
        half full without. They start in the next ticks, and end in other ones from then on, so that
        LoRAs are staged while the slots draw.
        """
        free = [slot for slot in range(lane.slots) if slot not in lane.active]
        started: list[SlotJob] = []
        ready = len(lane.active)
        while len(started) < len(free) and self._lanes.takes_jobs(lane):
            job = lane.waiting.take(self._weights.preferred)
            if job is None:
                break
            room_bytes = self._stager.room_bytes
            has_room = len(staging.first_within(room_bytes, [*started, job])) > len(started)
            may_wait = not waits or (self._draws_while_staging and 2 * ready >= lane.slots)
            if not has_room or (may_wait and job.is_being_staged):
                lane.waiting.jobs.insert(0, job)
                break
            started.append(job)
            ready += not job.is_being_staged
        lane.active |= dict(zip(free, started, strict=False))
        return free[: len(started)]

    def _start_together(
        self, lane: Lane, step: Step, slots: Sequence[int], finished: list[contract.Finished]
    ) -> None:
        """Starts the jobs of some slots, and loads the weights that the lane's slots lack.

        The jobs' LoRAs are on the device at the same time.
        """
        for slot in slots:
            if failure := self._stager.try_to_stage(lane.active[slot]):
                finished.append(failure)
                del lane.active[slot]
        with self._preparer.paused():
            for slot in slots:
                if slot in lane.active:
                    self._start(lane, step, slot)
            self._weights.load(lane)

    @torch.no_grad()
    def _start(self, lane: Lane, step: Step, slot: int) -> None:
        """Copies a staged job into its slot."""
        state, staged = step.state, lane.active[slot].staged
        if staged is None:
            raise RuntimeError("a job starts only once it is staged")
        rows = slice(2 * slot, 2 * slot + 2)
        state.latents[slot].copy_(staged.latents)
        # An earlier image's history has weight 0, but 0 times NaN would still be NaN.
        state.history[:, slot].zero_()
        if staged.inpainting is None:
            state.kept[slot].zero_()
            state.original[slot].zero_()  # 0 times NaN, too
        else:
            state.kept[slot].copy_(staged.inpainting.kept)
            state.original[slot].copy_(staged.inpainting.original)
        if state.mask is not None and staged.mask is not None:
            state.mask[rows].copy_(staged.mask)
        factors = staged.factors if lane.weight_mode != "shared" else {}
        self._unet.keys_values.compute(staged.vectors, factors, state.context[rows])
        if state.added is not None and staged.added is not None:
            added = slice(state.added_rows * slot, state.added_rows * (slot + 1))
            state.added[added].copy_(self._unet.embed_added(*staged.added))
        if state.conditioning is not None and staged.conditioning is not None:
            state.conditioning[slot].copy_(staged.conditioning)
        for control, hint in zip(step.controls, staged.hints, strict=True):
            control.fill(slot, hint, staged.vectors, staged.added)

    def _step(self, lane: Lane) -> None:
        """Runs one step of a lane's slots and passes finished latents to the decoder."""
        step = self._open(lane)
        inputs = step.feeder.next_inputs()
        inputs.rows.zero_()
        noisy = False
        for slot, job in lane.active.items():
            schedule = job.prepared.schedule
            inputs.rows[slot, :GUIDANCE] = schedule.table[job.call]
            inputs.rows[slot, GUIDANCE] = job.prepared.guidance(job.call)
            for at, control in enumerate(job.prepared.controls, GUIDANCE + 1):
                inputs.rows[slot, at] = control.weights[job.call]
            if schedule.noisy[job.call] and job.staged is not None:
                job.staged.noise.fill(inputs.noise[slot])
                noisy = True
        step.feeder.send(inputs, noisy=noisy)
        self._weights.finish_loading()
        self._runner.run(step, lane.weight_mode, max(lane.active) + 1)
        self._weights.note_step()
        for slot, job in list(lane.active.items()):
            job.call += 1
            if job.call == job.calls:
                del lane.active[slot]
                self._runner.count_image(lane.batch_key, lane.weight_mode)
                self._end_pass(job, step.state.latents[slot].clone())

    def _end_pass(self, job: SlotJob, latents: torch.Tensor) -> None:
        """Passes latents on: to the decoder, or to the lane of the job's second pass."""
        if job.staged is not None and job.staged.inpainting is not None:
            latents = sampler.restore(latents, job.staged.inpainting)
        if (following := job.prepared.next_pass) is None:
            self._decoder.add(job.ticket, latents)
            self._has_drawn_job |= not job.urgent
            return
        drawn = torch.cuda.current_stream().record_event() if self._on_gpu else None
        # Still alone if the first pass was.
        batch_key = BatchKey.of(following)._replace(isolated=job.batch_key.isolated)
        first_pass = FirstPass(latents, drawn)
        self._add(SlotJob(job.ticket, following, batch_key, job.urgent, first_pass=first_pass))

    def _stage_ahead(self) -> None:
        """Begins to stage the next jobs, as far as there is room for their LoRAs.

        Each lane's, for all of its slots: lanes that take turns also end their images together.
        """
        lanes = [lane for lane in self._lanes if lane.waiting.jobs]
        lanes.sort(key=self._lanes.urgency, reverse=True)
        nexts = itertools.zip_longest(*(lane.waiting.jobs[: lane.slots] for lane in lanes))
        self._stager.begin_within([job for each in nexts for job in each if job is not None])

    @torch.no_grad()
    def _fit_memory(self, slots: int | None) -> int:
        """Fits the GPU's memory for images of the checkpoint's native size; returns the blocks."""
        width, height = self.default_size
        state = self._runner.make_slot_state(self._runner.batch_key(width, height), 1)
        state_bytes = sum(tensor.nbytes for tensor in state if tensor is not None)
        is_large = self._checkpoint.family.has_large_layers
        decode = functools.partial(self._decoder.decode, state.latents)
        if is_large:
            is_too_large = memory.is_too_large(self._device, decode, self._unet.weights)
            self._decoder.is_striped = is_too_large
        fit = memory.fit(
            self._device,
            self._unet.slot_bytes + state_bytes,
            lambda: tick(self._unet, "shared", state, ()),
            decode,
            slots,
            is_compiled=self._runner.may_compile,
            weights=self._unet.weights,
            must_fit=is_large,
        )
        self._runner.slots = fit.slots
        self._decoder.slice_pixels = fit.decoded * width * height
        self._stager.room_bytes = fit.staged_bytes
        self._control_nets.kept_bytes = min(KEPT_BYTES, fit.staged_bytes / 2)
        self._unet.temporary_bytes = max(fit.temporary_bytes, self._unet.temporary_bytes)
        return fit.blocks

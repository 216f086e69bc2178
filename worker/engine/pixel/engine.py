"""The engine of a cascade's stage in pixels: each tick is one UNet call for every slot's image.

As in the slot engine of latent models, each slot has its own image, step, schedule, guidance, text
and noise, and is refilled the tick after its image is done. All images of a stage have one size, so
there is one lane; a stage has no VAE and no LoRAs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from imagefleet import errors
from imagefleet.job.prompt import Prompt
from worker.engine import contract, decoder
from worker.engine import errors as engine_errors
from worker.engine.kernels.background import Around, BackgroundTracer, nothing_around
from worker.engine.kernels.compile import Compiled, GraphPool, exempt_from_collection
from worker.engine.kernels.layers import time_convolutions
from worker.engine.noise import NoiseStream
from worker.engine.pixel import text_stage, text_states
from worker.engine.pixel.checkpoint import PixelCheckpoint
from worker.engine.pixel.images import FinishedImages
from worker.engine.pixel.prepare import PreparedRequest, RequestPreparer
from worker.engine.pixel.step import GUIDANCE, SlotState, find_rank, make_slot_state, tick
from worker.engine.pixel.unet import PixelUnet
from worker.engine.slots import memory
from worker.engine.slots.step import InputFeeder
from worker.engine.upscalers.beside import BesideTicks, PreparedUpscale
from worker.engine.upscalers.model import UpscalerCache

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """One admitted request."""

    ticket: int
    prepared: PreparedRequest
    call: int = 0
    noise: NoiseStream | None = None
    """The noise of the image, from when it is in a slot."""
    is_isolated: bool = False
    """Drawn alone: it may be what breaks the calls of others."""

    def restart(self) -> None:
        """Back to the seed."""
        self.call, self.noise = 0, None


class PixelEngine:
    """A `contract.Engine` that draws *slots* images of one stage at once, each at its own step."""

    self_check: contract.SelfCheck | None = None
    """The node's checks of weights and images are for latent models."""

    def __init__(
        self, checkpoint: PixelCheckpoint, slots: int | None = None, *, backend: str | None = None
    ) -> None:
        """*slots* None fits them to the GPU's memory; *backend* is torch.compile's, or None.

        Raises:
            SetupError: one image does not fit the GPU's memory.
        """
        self.model_name = checkpoint.name
        self.family = checkpoint.family
        has_encoder = text_stage.has_encoder(checkpoint.folder)
        self.text_encoder = None if has_encoder else checkpoint.encoder
        self.default_size = checkpoint.default_size
        self.lora_lookups: Mapping[str, int] = {"hit": 0, "miss": 0, "no_effect": 0}
        self.recompiles = 0
        """Graphs compiled after the warm-up; above 0 is a bug."""
        self._checkpoint = checkpoint
        self._unet = PixelUnet(checkpoint.unet, is_compiled=backend is not None)
        self._device = self._unet.device
        self._on_gpu = self._device.type == "cuda"
        self._preparer = RequestPreparer(checkpoint)
        self._upscales = BesideTicks(UpscalerCache(self._device), self._device)
        self._backend = backend
        self._pool = GraphPool(self._device) if self._on_gpu and backend else None
        self._compiled: Compiled | None = None
        self._tracing: Compiled | None = None
        self._tracer = BackgroundTracer(self._device)
        noise = checkpoint.noise
        values = 3 * self.default_size[0] * self.default_size[1]
        self._limit = noise.limit
        self._rank = None if noise.quantile is None else find_rank(noise.quantile, values)
        self._waiting: deque[_Job] = deque()
        self._active: dict[int, _Job] = {}
        self._finished = FinishedImages()
        self._copied: deque[torch.cuda.Event] = deque()
        self.slots = slots or memory.CPU_SLOTS
        """Images drawn in one call; reduced when the memory runs out."""
        if self._on_gpu:
            self.slots = self._fit_memory(slots)
        self._state, self._feeder = self._open()

    @property
    def is_compiling(self) -> bool:
        """True while something is compiled beside the ticks."""
        return self._tracing is not None

    @property
    def capacity(self) -> int:
        return 2 * self.slots

    @property
    def free(self) -> int:
        """One job ready for each slot; none more after the slots were reduced."""
        held = len(self._active) + len(self._waiting) + len(self._upscales.begun)
        return max(0, self.capacity - held)

    @property
    def busy(self) -> bool:
        is_traced = self._tracing is not None and self._tracer.is_done
        draws = self._active or self._waiting or self._finished.busy
        return bool(draws or self._upscales.begun or is_traced)

    def find_embeddings(
        self,
        prompts: Iterable[Prompt | str],  # noqa: ARG002 - the contract's
        names: Collection[str],  # noqa: ARG002
    ) -> tuple[str, ...]:
        """Finds no embeddings: they are made for CLIP's encoders."""
        return ()

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
        add = self._waiting.appendleft if urgent else self._waiting.append
        add(_Job(ticket, prepared))

    def tick(self) -> list[contract.Finished]:
        """Fills the free slots and runs one step; returns the finished images.

        Raises:
            NodeError: the GPU itself is broken.
        """
        self._take_up_traced()
        finished: list[contract.Finished] = []
        failure: errors.FleetError | None = None
        out_of_memory = False
        try:
            self._fill()
            if self._active:
                self._step()
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
        wait = not (self._active or self._waiting or finished)
        finished += self._finished.collect(wait=wait)
        return finished + self._upscales.collect(wait=wait and not finished)

    def warm_up(self) -> None:
        """Compiles and records the tick of all slots; a minute or two on a GPU."""
        if self._backend is not None:
            began_at = time.monotonic()
            self._take_up(self._make_compiled())
            log.info(
                "%d slots ready after %.0f s",
                self.slots,
                time.monotonic() - began_at,
                extra={"action": "warm"},
            )

    def compile_in_background(self, around: Around = nothing_around) -> None:
        """The same while images are drawn; *around* is entered while something is compiled."""
        if self._backend is not None:
            self._tracer.around = around
            self._tracing = self._make_compiled()
            self._tracer.begin(self._tracing)

    def finish_compiling(self) -> None:
        """Waits until what is compiled in the background is in use."""
        self._tracer.wait()
        self._take_up_traced()

    def close(self) -> None:
        self._tracer.abandon()
        self._upscales.close()
        self._waiting.clear()
        self._active.clear()
        self._finished.clear()
        self._forget_compiled()
        self._unet.to("meta")
        gc.unfreeze()  # what was compiled is garbage from now on
        torch.cuda.empty_cache()

    # The parts of a tick.

    def _open(self) -> tuple[SlotState, InputFeeder]:
        state = self._make_state(self.slots)
        return state, InputFeeder(state, self._copied)

    def _make_state(self, slots: int) -> SlotState:
        return make_slot_state(
            self._unet,
            slots,
            size=self.default_size,
            tokens=text_states.TOKENS,
            upscales=self._checkpoint.image_noise is not None,
        )

    def _fill(self) -> None:
        """Starts waiting jobs in the free slots; an isolated one only in empty company."""
        for slot in range(self.slots):
            if not self._waiting or any(job.is_isolated for job in self._active.values()):
                return
            if slot in self._active:
                continue
            if self._waiting[0].is_isolated and self._active:
                return
            self._active[slot] = self._waiting.popleft()
            self._start(slot, self._active[slot])

    @torch.no_grad()
    def _start(self, slot: int, job: _Job) -> None:
        """Puts a job's first noise, its text and its upscaled image into its slot."""
        state, prepared, rows = self._state, job.prepared, slice(2 * slot, 2 * slot + 2)
        job.noise = prepared.noise()
        images = job.noise.first() * prepared.schedule.initial_scale
        if prepared.schedule.initial_churn is not None:
            churn = torch.empty_like(images)
            job.noise.fill(churn)
            images += churn * prepared.schedule.initial_churn
        state.images[slot].copy_(images)
        # An earlier image's history has weight 0, but 0 times NaN would still be NaN.
        state.history[:, slot].zero_()
        image_noise = self._checkpoint.image_noise
        if state.upscaled is not None and prepared.upscaled is not None and image_noise is not None:
            level = image_noise.alphas_cumprod[prepared.noise_level]
            noise = torch.empty_like(images)
            job.noise.fill(noise)
            state.upscaled[slot].copy_(level**0.5 * prepared.upscaled + (1 - level) ** 0.5 * noise)
        states = prepared.states.to(self._device)
        context, added = self._unet.embed_text(states, prepared.noise_level)
        state.context[rows].copy_(context)
        state.added[rows].copy_(added)

    def _step(self) -> None:
        """Runs one step of all slots and passes finished images on."""
        inputs = self._feeder.next_inputs()
        inputs.rows.zero_()
        noisy = False
        for slot, job in self._active.items():
            schedule = job.prepared.schedule
            inputs.rows[slot, :GUIDANCE] = schedule.table[job.call]
            inputs.rows[slot, GUIDANCE] = job.prepared.guidance(job.call)
            if schedule.noisy[job.call] and job.noise is not None:
                job.noise.fill(inputs.noise[slot])
                noisy = True
        self._feeder.send(inputs, noisy=noisy)
        self._run(max(self._active) + 1)
        done = []
        for slot, job in self._active.items():
            job.call += 1
            if job.call == job.prepared.calls:
                done.append(slot)
        if done:
            tickets = [self._active.pop(slot).ticket for slot in done]
            self._finished.add(tickets, torch.stack([self._state.images[slot] for slot in done]))

    @torch.no_grad()
    def _run(self, slots: int) -> None:
        """One tick, in which the first *slots* slots hold images; compiled, all are computed."""
        if self._compiled is not None:
            self._compiled()
        else:
            time_convolutions(lasting=slots == self.slots)
            tick(self._unet, self._limit, self._rank, self._state.first(slots))

    # Compiling, recovery and memory.

    def _make_compiled(self) -> Compiled:
        width, height = self.default_size
        return Compiled(
            f"the UNet for {self.slots} slots of {width}x{height} pixels",
            tick,
            (self._unet, self._limit, self._rank, self._state),
            backend=self._backend,
            pool=self._pool,
        )

    def _take_up_traced(self) -> None:
        if self._tracing is None or not self._tracer.is_done:
            return
        compiled, self._tracing = self._tracing, None
        try:
            self._tracer.result()
            self._take_up(compiled)
        except Exception as error:  # images can be drawn without
            failure = engine_errors.classify(error)
            self._forget_compiled()
            self._backend = None
            log.warning(
                "compilation is off from now on: %s",
                failure.message,
                exc_info=True,
                extra={"action": "compile_failed"},
            )

    def _take_up(self, compiled: Compiled) -> None:
        """Records a compiled tick and runs with it from now on; keeps the images."""
        time_convolutions(lasting=True)
        with _keeping(self._state):
            compiled()
        self._compiled = compiled
        self.recompiles = compiled.recompiles
        if self._on_gpu:
            exempt_from_collection()

    def _forget_compiled(self) -> None:
        for each in (self._compiled, self._tracing):
            if each is not None:
                each.release()
        self._compiled = self._tracing = None

    def _recover(
        self,
        finished: list[contract.Finished],
        failure: errors.FleetError,
        *,
        out_of_memory: bool,
    ) -> None:
        """Restarts the images from their seeds, in a way that is less likely to fail.

        Out of memory, in fewer slots; else uncompiled, then each alone. A job that fails alone is
        finished.
        """
        jobs = list(self._active.values())
        self._active.clear()
        in_call = self.slots if self._compiled is not None else len(jobs)
        for job in jobs:
            job.restart()
        if out_of_memory and in_call > 1:
            self._shrink(memory.fewer(in_call))
        elif self._compiled is not None:
            log.warning(
                "compilation is off from now on: a compiled tick failed",
                extra={"action": "compile_dropped"},
            )
            self._forget_compiled()
            self._backend = None
        elif len(jobs) > 1:
            for job in jobs:
                job.is_isolated = True
        else:
            finished.extend(contract.Finished(job.ticket, failure) for job in jobs)
            jobs = []
        self._waiting.extendleft(reversed(jobs))
        torch.cuda.empty_cache()

    def _shrink(self, slots: int) -> None:
        """Runs in fewer slots, uncompiled until they are compiled as well."""
        log.warning("out of memory: reduced to %d slots", slots, extra={"action": "slots_shrunk"})
        if self._tracing is not None:
            self._tracer.abandon()
            self._tracer.wait()
            with contextlib.suppress(Exception):  # of what is not used any more
                self._tracer.result()
        self._forget_compiled()
        self.slots = slots
        del self._state, self._feeder
        torch.cuda.empty_cache()  # the memory of CUDA graphs too, which nothing else could use
        self._state, self._feeder = self._open()
        self.compile_in_background(self._tracer.around)

    @torch.no_grad()
    def _fit_memory(self, slots: int | None) -> int:
        state = self._make_state(1)
        size = sum(tensor.nbytes for tensor in state if tensor is not None)
        fit = memory.fit(
            self._device,
            size,
            lambda: tick(self._unet, self._limit, self._rank, state),
            lambda: decoder.to_pixels(state.images),
            slots,
            is_compiled=self._backend is not None,
            must_fit=True,
        )
        return fit.slots


@contextlib.contextmanager
def _keeping(state: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Restores the tensors that ticks change."""
    kept = [(each, each.clone()) for each in state if each is not None]
    yield
    for tensor, copied in kept:
        tensor.copy_(copied)

"""Copies jobs to the device before a slot is free for them, concurrently with the ticks.

It uses a thread and a stream of its own: copying a large LoRA and encoding a prompt wait for the
device (tokens are copied, weighted vectors checked), but never for the ticks. Images that jobs
begin with are encoded here as well, those of a second pass after they have been upscaled.
"""

import contextlib
import itertools
import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers import AutoencoderTiny
from torch import Tensor

from imagefleet.files.safetensors import Identity
from imagefleet.job.clip import Chunk
from worker.engine import errors as engine_errors
from worker.engine import text
from worker.engine.checkpoint import Checkpoint
from worker.engine.contract import Finished
from worker.engine.families.table import Family, Model
from worker.engine.lora.merge import NO_CHANGES, LoraChanges
from worker.engine.passes.begin import LowResolution
from worker.engine.passes.checkpoints import CachedCheckpoint, Caches, Coders
from worker.engine.passes.images import ImageCoder
from worker.engine.sampler import Inpainting
from worker.engine.slots.prepare import AssembledLoras, PreparedRequest
from worker.engine.slots.queue import (
    AddedInputs,
    SlotJob,
    Staged,
)

#: Threads that assemble LoRAs; with a large one for each job, one is not enough.
_ASSEMBLERS = 3

#: Added to the attention scores past a prompt's end; -inf would make an unused slot all NaN.
_MASKED = -10_000.0


#: A job, its result, and its LoRAs if they are being assembled already.
_Begun = tuple[SlotJob, "Future[Staged]", "Future[AssembledLoras] | None"]


class Stager:
    """Copies jobs' data to the device, on a thread of its own, as a family says in `_load`.

    `begin_within` and `try_to_stage` are for the engine's thread.
    """

    def __init__(self, model: Model, caches: Caches) -> None:
        self._caches = caches
        self._device: torch.device = model.unet.device
        self._channels = model.channels
        self._factor = model.factor
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            # High priority: it has little to do, and a slot may wait for it.
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = ThreadPoolExecutor(1, "stager")
        self._assemblers = ThreadPoolExecutor(_ASSEMBLERS, "assembler")
        #: Memory for ControlNets and VAEs, and for the LoRAs of jobs that have no slot yet.
        self.room_bytes = math.inf
        #: Held while LoRAs may be merged into the text encoder.
        self.text_encoder_lock = threading.Lock()

    def first_with_room(self, jobs: Sequence[SlotJob]) -> Sequence[SlotJob]:
        """The first of *jobs* whose LoRAs have room on the device together; at least one."""
        beside = (self._caches.control_nets, self._caches.vaes)
        held_bytes = sum(cache.held_bytes for cache in beside if cache)
        room_bytes = max(0.0, self.room_bytes - held_bytes)
        taken = itertools.accumulate(job.prepared.lora_bytes for job in jobs)
        return jobs[: max(1, bisect_right(list(taken), room_bytes))]

    def begin(self, jobs: Iterable[SlotJob]) -> None:
        """Starts to stage jobs; their prompts are encoded together."""
        begun = []
        for job in jobs:
            if not (job.staged or job.staging):
                job.staging = Future()
                begun.append((job, job.staging, job.assembling))
                job.assembling = None
        if begun:
            self._thread.submit(self._stage_all, begun)

    def begin_within(self, jobs: Sequence[SlotJob]) -> None:
        """Starts to stage the first of *jobs* whose LoRAs have room on the device.

        Those of the next ones are assembled in host memory meanwhile.
        """
        staged = self.first_with_room(jobs)
        self.begin(staged)
        for job in jobs[len(staged) : len(staged) + _ASSEMBLERS]:
            if not (job.staged or job.staging or job.assembling):
                job.assembling = self._assemble(job)

    def try_to_stage(self, job: SlotJob) -> Finished | None:
        """Waits until a job is staged; the failure of one whose own prompt or LoRA is at fault."""
        if job.staged is not None:
            return None
        self.begin([job])
        staging = job.staging
        job.staging = None
        try:
            job.staged = staging.result() if staging is not None else None
        except Exception as error:  # any failure is this job's outcome
            if engine_errors.is_out_of_memory(error):
                raise
            return Finished(job.ticket, engine_errors.classify(error))
        if job.staged is not None and self._device.type == "cuda":
            ticks = torch.cuda.current_stream(self._device)
            for tensor in job.staged.tensors:
                tensor.record_stream(ticks)
        return None

    def changes_of(self, job: SlotJob) -> LoraChanges:
        """A job's changes of the UNet; copied again if a slot held them already."""
        packed = job.prepared.pack
        if packed is None or job.data.loras is not None:
            return job.data.changes
        return packed.of(packed.assemble().to(self._device))

    def forget(self) -> None:
        """Forgets what replaced weights have computed; nothing may be staged meanwhile."""

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._assemblers.shutdown()
        self.forget()

    def _stage_all(self, begun: Sequence[_Begun]) -> None:
        on_device = (
            torch.cuda.device(self._device)
            if self._stream
            else contextlib.nullcontext()
        )
        with on_device, torch.cuda.stream(self._stream):
            # What fails here fails again below, with the job whose fault it is.
            with contextlib.suppress(Exception):
                self._encode_together(job for job, _, _ in begun)
            for (job, staging, _), assembled in self._assemble_ahead(begun):
                try:
                    loras = assembled.result()
                    with self.text_encoder_lock:
                        try:
                            staged = self._load(job, loras)
                        finally:
                            # Until then the copies read memory that is used again afterwards.
                            if self._stream is not None:
                                self._stream.synchronize()
                    staging.set_result(staged)
                except Exception as error:  # noqa: BLE001 - raised again by `try_to_stage`
                    staging.set_exception(error)

    def _encode_together(self, jobs: Iterable[SlotJob]) -> None:
        """Computes what is faster for several jobs at once."""

    def _assemble_ahead(
        self, begun: Iterable[_Begun]
    ) -> Iterator[tuple[_Begun, Future[AssembledLoras]]]:
        """Yields all jobs in order, while the LoRAs of the next few are assembled."""
        waiting = iter(begun)
        ahead: deque[tuple[_Begun, Future[AssembledLoras]]] = deque()
        while True:
            for begun_job in itertools.islice(waiting, _ASSEMBLERS + 1 - len(ahead)):
                ahead.append((begun_job, begun_job[2] or self._assemble(begun_job[0])))
            if not ahead:
                return
            yield ahead.popleft()

    def _assemble(self, job: SlotJob) -> Future[AssembledLoras]:
        return self._assemblers.submit(job.prepared.assemble)

    def _load(self, job: SlotJob, loras: AssembledLoras) -> Staged:
        """Begins to copy a job's data, and computes what it starts from."""
        raise NotImplementedError

    def _copy_enlarged(
        self, enlarged: LowResolution, drawn: Tensor
    ) -> tuple[Tensor, AddedInputs]:
        """The image that is enlarged, with the noise that was *drawn*, and the noise's level."""
        level = self._copy(torch.tensor([enlarged.level]))
        return self._copy(enlarged.with_noise(drawn)), (level,)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


class LatentStager(Stager):
    """Encodes images as well, and prompts as a family says in `_encode`."""

    def __init__(
        self,
        model: Model,
        images: ImageCoder,
        caches: Caches,
        tiny: AutoencoderTiny | None = None,
    ) -> None:
        """*images*: the coder of the model's own VAE."""
        super().__init__(model, caches)
        self._tiny = tiny
        self._dtype: torch.dtype = model.unet.dtype
        self._is_inpainting = (
            model.conditioning_channels > 0 and not model.family.enlarges_image
        )
        self._images = images

    def _encode(
        self, job: SlotJob, loras: AssembledLoras, other: CachedCheckpoint | None
    ) -> tuple[Tensor, Tensor | None, AddedInputs | None]:
        """Vectors, the mask and the added inputs, if any: see `Staged`."""
        raise NotImplementedError

    @torch.no_grad()
    def _load(self, job: SlotJob, loras: AssembledLoras) -> Staged:
        prepared = job.prepared
        copied = None
        changes = NO_CHANGES
        if prepared.pack is not None:
            copied = self._copy(loras[prepared.family.backbone])
            changes = prepared.pack.of(copied)
        other = None
        if prepared.checkpoint is not None and self._caches.checkpoints is not None:
            other = self._caches.checkpoints.get(prepared.checkpoint)
        vectors, mask, added = self._encode(job, loras, other)
        noise = prepared.noise(self._channels, self._factor)
        coder = self._coder_of(prepared, prepared.checkpoint)
        if job.first_pass is not None and prepared.begins:
            # What the calls have taken that another checkpoint has done before.
            spent = torch.empty_like(prepared.first_latents(noise))
            for _ in range(sum(prepared.schedule.noisy[: prepared.begins])):
                noise.fill(spent)
            return replace(
                job.first_pass,
                vectors=vectors,
                noise=noise,
                mask=mask,
                added=added,
                loras=copied,
                changes=changes,
                hints=job.first_pass.hints[: len(prepared.controls)],
                coder=coder,
                checkpoint=other,
            )
        conditioning = None
        if prepared.enlarged is not None:
            drawn = noise.draw(prepared.enlarged.image.shape)
            conditioning, added = self._copy_enlarged(prepared.enlarged, drawn)
        latents = self._copy(prepared.first_latents(noise))
        images = self._coder_of(prepared, prepared.begun_by) or self._images
        original = self._image_of(job, images)
        image = prepared.image
        kept = None
        if original is not None:
            latents = latents + prepared.schedule.image_scale * original
            if image is not None and image.kept is not None:
                kept = Inpainting(self._copy(image.kept), original)
        hints = list(map(self._caches.control_nets.embed, prepared.controls))
        if self._is_inpainting:
            request = prepared.request
            # A second pass has no mask: as in AUTOMATIC1111, it sees nothing of the first image.
            conditioning = images.condition(image, request.width, request.height)
        return Staged(
            latents,
            vectors,
            noise,
            mask=mask,
            added=added,
            loras=copied,
            changes=changes,
            inpainting=kept,
            hints=hints,
            conditioning=conditioning,
            coder=coder,
            checkpoint=other,
        )

    def _coder_of(
        self, prepared: PreparedRequest, checkpoint: Identity | None
    ) -> ImageCoder | None:
        """The VAE of a request or else of a checkpoint; None: the engine's own as it is."""
        coder = None
        caches = self._caches
        if prepared.vae is not None and caches.vaes is not None:
            coder = caches.vaes.get(prepared.vae)
        elif checkpoint is not None and caches.checkpoints is not None:
            coder = caches.checkpoints.get(checkpoint).coders.images
        if prepared.request.tiling:
            return (coder or self._images).tiling
        return coder

    def _image_of(self, job: SlotJob, images: ImageCoder) -> Tensor | None:
        """The latents [4, height, width] that a job begins with beside noise, if any."""
        prepared = job.prepared
        drawn = job.first_pass
        upscaling = prepared.upscaling
        if drawn is not None and upscaling is not None:
            if self._stream is not None and job.drawn is not None:
                self._stream.wait_event(job.drawn)
            if upscaling.latent_mode is not None:
                latents = upscaling.enlarge_latents(drawn.latents, self._factor)
            else:
                tiny = self._tiny if prepared.request.decoder != "Full" else None
                pixels = (drawn.coder or self._images).decode(drawn.latents, tiny)
                latents = images.encode(upscaling.enlarge_pixels(pixels))
            return upscaling.crop(latents, self._factor)
        if prepared.image is None:
            return None
        latents = images.encode_init(prepared.image)
        return prepared.image.with_content(latents, prepared.request)


class ClipStager(LatentStager):
    """Encodes prompts chunk by chunk, with CLIP's text encoders."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        caches: Caches,
        tiny: AutoencoderTiny | None,
    ) -> None:
        self._own = Coders(checkpoint)
        super().__init__(checkpoint, self._own.images, caches, tiny)

    def forget(self) -> None:
        self._own.forget()

    def close(self) -> None:
        super().close()
        for loras in self._own.loras.values():
            loras.close()

    @torch.no_grad()
    def _encode_together(self, jobs: Iterable[SlotJob]) -> None:
        """Encodes the prompts of all jobs without LoRAs for the text encoder."""
        chunks: dict[int, list[Chunk]] = {}
        for job in jobs:
            prepared = job.prepared
            if not (prepared.text_key or prepared.checkpoint):
                by_clip_skip = chunks.setdefault(prepared.request.clip_skip, [])
                by_clip_skip += (
                    chunk for chunks, _ in prepared.texts for chunk in chunks
                )
        for clip_skip, alike in chunks.items():
            self._own.texts.encode_ahead(alike, clip_skip)

    def _encode(
        self, job: SlotJob, loras: AssembledLoras, other: CachedCheckpoint | None
    ) -> tuple[Tensor, Tensor | None, AddedInputs | None]:
        coders = other.coders if other else self._own
        prepared = job.prepared
        texts = prepared.texts
        if not job.batch_key.is_masked:
            plain = text.PLAIN_CHUNKS
            texts = [(chunks * (plain // length), plain) for chunks, length in texts]
        prompts, filled = zip(*texts, strict=True)
        with self._loras_merged(prepared, loras, coders):
            clip_skip = prepared.request.clip_skip
            context = coders.texts.encode(prompts, clip_skip, prepared.text_key, filled)
        vectors, added = self._finish(prepared, context, coders.family)
        if not job.batch_key.is_masked:
            return vectors, None, added
        missing = job.batch_key.tokens - vectors.shape[1]
        inside = F.pad(context.mask, (0, missing))
        mask = torch.where(inside, 0.0, _MASKED)[:, None, None].to(self._dtype)
        return F.pad(vectors, (0, 0, 0, missing)), self._copy(mask), added

    def _finish(
        self, prepared: PreparedRequest, context: text.Context, family: Family
    ) -> tuple[Tensor, AddedInputs | None]:
        """Vectors on the device, in the UNet's type, and its added inputs, if it has any."""
        vectors = context.vectors.to(self._device, self._dtype)
        pooled = context.pooled
        prompts = sum(len(row.texts) for row in prepared.text_rows[:-1])
        if family.zeroes_empty_negative and not any(prepared.text_rows[-1].texts):
            kept = (torch.arange(len(vectors), device=vectors.device) < prompts).to(
                vectors.dtype
            )
            vectors = vectors * kept[:, None, None]
            pooled = None if pooled is None else pooled * kept.to(pooled)[:, None]
        if pooled is None:
            return vectors, None
        # As AUTOMATIC1111 tells SDXL: of a second pass, the size before the rest is cut off.
        size = prepared.request.width, prepared.request.height
        if prepared.upscaling is not None:
            size = prepared.upscaling.size
        numbers = range(len(vectors))
        sizes = torch.stack(
            [family.size_ids(*size, is_negative=at >= prompts) for at in numbers]
        )
        return vectors, (pooled.to(self._device, self._dtype), self._copy(sizes))

    @contextlib.contextmanager
    def _loras_merged(
        self, prepared: PreparedRequest, loras: AssembledLoras, coders: Coders
    ) -> Iterator[None]:
        """The text encoders with a request's LoRAs merged in."""
        with contextlib.ExitStack() as merged:
            for network in prepared.packs.keys() & coders.loras.keys():
                own = coders.loras[network]
                flat = loras[network].to(own.device, non_blocking=True)
                changes = prepared.packs[network].of(flat).stacked
                merged.enter_context(own.merged(changes))
            yield

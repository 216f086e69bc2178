"""Brings jobs to the device before a slot is free for them, beside the ticks.

On a stream of its own: encoding a prompt waits for the device here and there (its tokens are
copied, its weighted vectors checked), and so waits for this stream alone, never for the ticks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from worker.engine import text
from worker.engine.checkpoint import Checkpoint
from worker.engine.lora import merge
from worker.engine.slots import pack
from worker.engine.slots.queue import PLAIN_CHUNKS, SlotJob, Staged

#: What is added to the scores of places past a prompt's end; -inf would make a slot that nobody
#: has used yet all NaN.
_MASKED = -10_000.0


class Stager:
    """The text encoder, and the way of a job's data to the device."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._device = checkpoint.unet.device
        self._dtype = checkpoint.unet.dtype
        self._channels = int(checkpoint.unet.config.in_channels)
        self._factor = checkpoint.vae_factor
        self._encoder = text.Encoder(
            checkpoint.text_encoder,
            start=checkpoint.tokenizer.bos_token_id,
            end=checkpoint.tokenizer.eos_token_id,
        )
        self._text_loras = pack.TextEncoderLoras(checkpoint.text_encoder)
        self._merger = merge.Merger(checkpoint.unet, checkpoint.text_encoder)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            # Ahead of the ticks: it has little to do, and a slot may wait for it.
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())

    @torch.no_grad()
    def stage(self, job: SlotJob) -> None:
        """Encodes a job's prompts and copies all that it needs, unless that is done.

        Raises:
            JobError: the weights in a prompt cancel each other out.
        """
        if job.staged is not None:
            return
        with torch.cuda.stream(self._stream):
            changes = job.ready.unet_changes
            flat = self._copy(changes.flat) if changes else None
            factors = changes.by_group(flat) if changes and flat is not None else {}
            vectors, mask = self._encode(job)
            generator = torch.Generator().manual_seed(job.ready.request.seed)
            latents = self._copy(self._first_latents(job, generator))
        if self._stream is not None:
            ticks = torch.cuda.current_stream()
            for tensor in (latents, vectors, mask, flat):
                if tensor is not None:
                    tensor.record_stream(ticks)
            self._stream.synchronize()
        job.staged = Staged(latents, vectors, mask, factors, generator)

    def close(self) -> None:
        self._encoder.clear()
        self._merger.close()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _first_latents(self, job: SlotJob, generator: torch.Generator) -> torch.Tensor:
        # Each from its own generator, on the CPU: an image depends on no other, and on no GPU.
        request = job.ready.request
        shape = (self._channels, request.height // self._factor, request.width // self._factor)
        return torch.randn(shape, generator=generator) * job.ready.prepared.schedule.initial_scale

    def _encode(self, job: SlotJob) -> tuple[torch.Tensor, torch.Tensor | None]:
        prepared = job.ready.prepared
        prompts = [prepared.prompt, prepared.negative_prompt]
        if not job.batch_key.is_masked:
            prompts = [prompt * (PLAIN_CHUNKS // len(prompt)) for prompt in prompts]
        with self._changed(job):
            context = self._encoder.encode(prompts, prepared.request.clip_skip, prepared.text_loras)
        vectors = context.vectors.to(self._dtype)
        if not job.batch_key.is_masked:
            return vectors, None
        tokens = vectors.shape[1]
        padded = vectors.new_zeros((2, job.batch_key.tokens, vectors.shape[2]))
        padded[:, :tokens] = vectors
        lengths = [len(prompt) * text.CONTEXT_TOKENS for prompt in prompts]
        inside = torch.arange(job.batch_key.tokens) < torch.tensor(lengths)[:, None]
        mask = torch.where(inside, 0.0, _MASKED)[:, None, None].to(self._dtype)
        return padded, self._copy(mask)

    @contextlib.contextmanager
    def _changed(self, job: SlotJob) -> Iterator[None]:
        """The text encoder with a job's LoRAs in it."""
        changes = job.ready.text_changes
        if changes is not None:
            with self._text_loras.merged(changes.by_layer(self._copy(changes.flat))):
                yield
            return
        self._merger.activate(pack.restrict(job.ready.prepared.loras, "text_encoder"))
        try:
            yield
        finally:
            self._merger.activate(())

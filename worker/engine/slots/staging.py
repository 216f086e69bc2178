"""Copies jobs to the device before a slot is free for them, concurrently with the ticks.

It uses a separate stream: encoding a prompt synchronises (its tokens are copied, its weighted
vectors checked), so it waits for this stream only, never for the ticks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from worker.engine import text
from worker.engine.checkpoint import Checkpoint
from worker.engine.lora import merge
from worker.engine.slots.linear import Factors, Group, TextEncoderLoras
from worker.engine.slots.prepare import PLAIN_CHUNKS, PreparedRequest
from worker.engine.slots.queue import SlotJob, Staged

#: Added to the attention scores past a prompt's end; -inf would make an unused slot all NaN.
_MASKED = -10_000.0


class Stager:
    """Encodes prompts and copies a job's data to the device."""

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
        self._text_loras = TextEncoderLoras(checkpoint.text_encoder)
        self._merger = merge.Merger(checkpoint.unet, checkpoint.text_encoder)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            # High priority: it has little to do, and a slot may wait for it.
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())

    @torch.no_grad()
    def stage(self, job: SlotJob) -> None:
        """Encodes a job's prompts and copies its data; nothing if that is already done.

        Raises:
            JobError: the weights in a prompt cancel each other out.
        """
        if job.staged is not None:
            return
        with torch.cuda.stream(self._stream):
            packed = job.prepared.unet_pack
            flat = self._copy(packed.flat) if packed else None
            factors = packed.by_group(flat) if packed and flat is not None else {}
            vectors, mask = self._encode(job)
            generator = torch.Generator().manual_seed(job.prepared.request.seed)
            latents = self._copy(self._first_latents(job, generator))
        if self._stream is not None:
            ticks = torch.cuda.current_stream()
            for tensor in (latents, vectors, mask, flat):
                if tensor is not None:
                    tensor.record_stream(ticks)
            self._stream.synchronize()
        job.staged = Staged(latents, vectors, mask, factors, generator)

    def factors(self, job: SlotJob) -> Mapping[Group, Factors]:
        """A staged job's LoRAs on the device, copied again if they are no longer there."""
        packed = job.prepared.unet_pack
        if packed is None or job.staged is None or job.staged.factors:
            return {} if job.staged is None else job.staged.factors
        return packed.by_group(self._copy(packed.flat))

    def close(self) -> None:
        self._encoder.clear()
        self._merger.close()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _first_latents(self, job: SlotJob, generator: torch.Generator) -> torch.Tensor:
        # One CPU generator per image: its noise depends on no other image, and on no GPU.
        request = job.prepared.request
        shape = (self._channels, request.height // self._factor, request.width // self._factor)
        return torch.randn(shape, generator=generator) * job.prepared.schedule.initial_scale

    def _encode(self, job: SlotJob) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Vectors [2, tokens, width] and the mask [2, 1, 1, tokens], if any."""
        prepared = job.prepared
        prompts = [prepared.prompt, prepared.negative_prompt]
        if not job.batch_key.is_masked:
            prompts = [prompt * (PLAIN_CHUNKS // len(prompt)) for prompt in prompts]
        with self._loras_merged(prepared):
            key = merge.key_of(prepared.text_encoder_loras)
            context = self._encoder.encode(prompts, prepared.request.clip_skip, key)
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
    def _loras_merged(self, prepared: PreparedRequest) -> Iterator[None]:
        """The text encoder with a request's LoRAs merged in."""
        packed = prepared.text_encoder_pack
        if packed is not None:
            with self._text_loras.merged(packed.by_layer(self._copy(packed.flat))):
                yield
            return
        self._merger.activate(prepared.text_encoder_loras)
        try:
            yield
        finally:
            self._merger.activate(())

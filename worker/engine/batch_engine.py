"""The first engine: takes requests that can share a call, and runs them together to the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from worker.engine import contract, decode, denoise, text
from worker.engine import errors as engine_errors
from worker.engine.checkpoint import Checkpoint
from worker.engine.lora import merge
from worker.engine.slots import prepare as intake

log = logging.getLogger(__name__)

#: Requests held ready for each one in a batch: more of them group better where jobs differ in
#: size, steps or LoRAs, but take longer to finish when the worker drains.
_LOOKAHEAD_BATCHES = 2


class BatchEngine:
    """A `contract.Engine` whose images start and finish together, *max_batch* at most."""

    def __init__(self, checkpoint: Checkpoint, max_batch: int, lora_cache_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._device = checkpoint.unet.device
        self._preparer = intake.RequestPreparer(checkpoint, lora_cache_bytes)
        self._encoder = text.Encoder(
            checkpoint.text_encoder,
            start=checkpoint.tokenizer.bos_token_id,
            end=checkpoint.tokenizer.eos_token_id,
        )
        self._merger = merge.Merger(checkpoint.unet, checkpoint.text_encoder)
        self._max_batch = max_batch
        self._pixels_limit: int | None = None
        self._pending: dict[int, intake.Prepared] = {}

    @property
    def model_name(self) -> str:
        return self._checkpoint.name

    @property
    def default_size(self) -> tuple[int, int]:
        return self._preparer.default_size

    @property
    def capacity(self) -> int:
        return self._max_batch * _LOOKAHEAD_BATCHES

    @property
    def free(self) -> int:
        return self.capacity - len(self._pending)

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    @property
    def lora_lookups(self) -> Mapping[str, int]:
        return self._preparer.lora_lookups

    def prepare(self, request: contract.ImageRequest) -> contract.Prepared:
        """Checks a request against this checkpoint, tokenises its prompts and reads its LoRAs.

        Raises:
            JobError: this checkpoint cannot draw it, or a LoRA is missing or does not fit.
            TransientError: a LoRA could not be read.
        """
        return self._preparer.prepare(request)

    def admit(self, ticket: int, prepared: contract.Prepared) -> None:
        if not isinstance(prepared, intake.Prepared):
            raise TypeError("prepared by another engine")
        self._pending[ticket] = prepared

    def tick(self) -> list[contract.Finished]:
        """Runs the oldest request with all that can share its call, and finishes them."""
        tickets = self._next_batch()
        batch = [self._pending.pop(ticket) for ticket in tickets]
        outcomes = self._run(batch)
        return [contract.Finished(*pair) for pair in zip(tickets, outcomes, strict=True)]

    def close(self) -> None:
        self._pending.clear()
        self._encoder.clear()
        self._merger.close()
        for network in (self._checkpoint.unet, self._checkpoint.vae, self._checkpoint.text_encoder):
            network.to("meta")
        engine_errors.empty_cache(self._device)

    def _next_batch(self) -> list[int]:
        oldest = next(iter(self._pending.values()), None)
        if oldest is None:
            return []
        size = self._max_batch
        if self._pixels_limit is not None:
            size = min(size, max(1, self._pixels_limit // oldest.pixels))
        group = oldest.group
        alike = [ticket for ticket, other in self._pending.items() if other.group == group]
        return alike[:size]

    def _run(self, batch: Sequence[intake.Prepared]) -> list[contract.Outcome]:
        """Generates a batch; where that fails, its images in smaller ones, down to each alone."""
        try:
            self._merger.activate(batch[0].loras)
            return self._generate(batch)
        except Exception as error:  # whatever it is, it is the outcome of this batch
            out_of_memory = engine_errors.is_out_of_memory(error)
            failure = engine_errors.classify(error)
            log.warning(
                "a batch of %d failed: %s",
                len(batch),
                failure.message,
                exc_info=True,
                extra={"action": "batch_failed"},
            )
        # Only past the handler are the error's traceback, and the tensors it holds, gone.
        engine_errors.empty_cache(self._device)
        if len(batch) == 1:
            return [failure]
        if out_of_memory:
            self._pixels_limit = len(batch) // 2 * batch[0].pixels
            log.warning(
                "from now on a batch has %d pixels at most",
                self._pixels_limit,
                extra={"action": "batch_shrunk"},
            )
        share = (len(batch) + 1) // 2 if out_of_memory else 1
        parts = [batch[at : at + share] for at in range(0, len(batch), share)]
        return [outcome for part in parts for outcome in self._run(part)]

    @torch.inference_mode()
    def _generate(self, batch: Sequence[intake.Prepared]) -> list[contract.Outcome]:
        unet, factor = self._checkpoint.unet, self._checkpoint.vae_factor
        latents = denoise.denoise(unet, batch, self._encode_prompts(batch), factor)
        return decode.decode(self._checkpoint.vae, latents, batch[0].pixels)

    def _encode_prompts(self, batch: Sequence[intake.Prepared]) -> text.Context:
        """The prompts' rows, then the negative prompts', each of its own length."""
        prompts = [prepared.prompt for prepared in batch]
        negative_prompts = [prepared.negative_prompt for prepared in batch]
        first = batch[0]
        return self._encoder.encode(
            [*prompts, *negative_prompts], first.request.clip_skip, first.text_loras
        )

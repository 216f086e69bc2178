"""The first engine: takes requests that can share a call, and runs them together to the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jobs import errors
from worker.engine import contract, euler, faults, lora, lora_file, text
from worker.engine.checkpoint import Checkpoint

log = logging.getLogger(__name__)

#: Requests held ready for each one in a batch: more of them group better where jobs differ in
#: size, steps or LoRAs, but take longer to finish when the worker drains.
_LOOKAHEAD_BATCHES = 2

#: Pixels decoded in one call: the VAE needs far more memory for each than the UNet does.
_DECODE_PIXELS = 1024 * 1024

#: 32 chunks are 2,400 tokens. Without a limit, one prompt of 64 KiB could fill the GPU.
_MAX_CHUNKS = 32

#: Each LoRA of an image is held in memory twice while it is drawn.
_MAX_LORAS = 16

_SAMPLER = "euler_ancestral"


@dataclass(frozen=True, slots=True)
class _Prepared:
    request: contract.ImageRequest
    prompt: tuple[text.Chunk, ...]
    negative_prompt: tuple[text.Chunk, ...]
    loras: tuple[lora.Applied, ...]

    @property
    def group(self) -> tuple[object, ...]:
        """What two requests must have in common to share a call."""
        request = self.request
        context = max(len(self.prompt), len(self.negative_prompt))
        loras = tuple(applied.key for applied in self.loras)
        return (request.width, request.height, request.steps, request.clip_skip, context, loras)

    @property
    def pixels(self) -> int:
        return self.request.width * self.request.height


class BatchEngine:
    """A `contract.Engine` whose images start and finish together, *max_batch* at most."""

    def __init__(self, checkpoint: Checkpoint, max_batch: int, lora_cache_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._device = checkpoint.unet.device
        self._tokenizer = text.Tokenizer(checkpoint.tokenizer)
        layers = lora_file.Layers(checkpoint.unet, checkpoint.text_encoder)
        self._lora_cache = lora_file.LoraCache(layers, lora_cache_bytes)
        self._adapters = lora.Adapters(checkpoint.unet, checkpoint.text_encoder)
        self._max_batch = max_batch
        self._pixels_limit: int | None = None
        self._pending: dict[int, _Prepared] = {}

    @property
    def model_name(self) -> str:
        return self._checkpoint.name

    @property
    def default_size(self) -> tuple[int, int]:
        side = int(self._checkpoint.unet.config.sample_size) * self._checkpoint.vae_factor
        return side, side

    @property
    def capacity(self) -> int:
        return self._max_batch * _LOOKAHEAD_BATCHES

    @property
    def free(self) -> int:
        return self.capacity - len(self._pending)

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def prepare(self, request: contract.ImageRequest) -> contract.Prepared:
        """Checks a request against this checkpoint, tokenises its prompts and reads its LoRAs.

        Raises:
            JobError: this checkpoint cannot draw it, or a LoRA is missing or does not fit.
            TransientError: a LoRA could not be read.
        """
        factor = self._checkpoint.vae_factor
        if request.width % factor or request.height % factor:
            raise errors.JobError(
                f"{request.width}x{request.height} pixels are not to be had: both sides must be"
                f" multiples of {factor}"
            )
        if request.sampler != _SAMPLER:
            raise errors.JobError(
                f"this engine has no sampler {request.sampler!r}, only {_SAMPLER}"
            )
        layers = self._checkpoint.text_encoder.config.num_hidden_layers
        if not 1 <= request.clip_skip <= layers:
            raise errors.JobError(
                f"clip_skip is {request.clip_skip}; this model's text encoder has {layers} layers"
            )
        return _Prepared(
            request,
            self._chunks(request.prompt),
            self._chunks(request.negative_prompt),
            self._read_loras(request.loras),
        )

    def admit(self, ticket: int, prepared: contract.Prepared) -> None:
        if not isinstance(prepared, _Prepared):
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
        for network in (self._checkpoint.unet, self._checkpoint.vae, self._checkpoint.text_encoder):
            network.to("meta")
        faults.empty_cache(self._device)

    def _chunks(self, prompt: str) -> tuple[text.Chunk, ...]:
        chunks = self._tokenizer.chunks(prompt)
        if len(chunks) > _MAX_CHUNKS:
            raise errors.JobError(
                f"the prompt has {len(chunks)} chunks of {text.CHUNK_TOKENS} tokens; {_MAX_CHUNKS}"
                " at most"
            )
        return chunks

    def _read_loras(self, wanted: Sequence[contract.Lora]) -> tuple[lora.Applied, ...]:
        """A LoRA that is named twice counts twice; their order does not matter."""
        if len(wanted) > _MAX_LORAS:
            raise errors.JobError(f"the prompt has {len(wanted)} LoRAs; {_MAX_LORAS} at most")
        files: dict[lora_file.Identity, lora_file.LoraFile] = {}
        weights: dict[lora_file.Identity, dict[lora_file.Network, float]] = {}
        for one in wanted:
            file = self._lora_cache.get(one)
            files[file.identity] = file
            sums = weights.setdefault(file.identity, {"unet": 0.0, "text_encoder": 0.0})
            sums["unet"] += one.unet_weight
            sums["text_encoder"] += one.text_encoder_weight
        effective = [identity for identity in sorted(files) if any(weights[identity].values())]
        return tuple(lora.Applied(files[identity], weights[identity]) for identity in effective)

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

    def _run(self, batch: Sequence[_Prepared]) -> list[contract.Outcome]:
        """Generates a batch; where that fails, its images in smaller ones, down to each alone."""
        try:
            self._adapters.activate(batch[0].loras)
            return self._generate(batch)
        except Exception as error:  # whatever it is, it is the outcome of this batch
            out_of_memory = faults.is_out_of_memory(error)
            failure = faults.classify(error)
            log.warning(
                "a batch of %d failed: %s",
                len(batch),
                failure.message,
                exc_info=True,
                extra={"action": "batch_failed"},
            )
        # Only past the handler are the error's traceback, and the tensors it holds, gone.
        faults.empty_cache(self._device)
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
    def _generate(self, batch: Sequence[_Prepared]) -> list[contract.Outcome]:
        latents = self._denoise(batch, self._encode_prompts(batch))
        outcomes: list[contract.Outcome] = []
        slice_size = max(1, _DECODE_PIXELS // batch[0].pixels)
        for part in torch.split(latents, slice_size):
            outcomes.extend(self._decode(part))
        return outcomes

    def _encode_prompts(self, batch: Sequence[_Prepared]) -> torch.Tensor:
        """Contexts [2 x batch, tokens, width]: the prompts', then the negative prompts'."""
        prompts = [prepared.prompt for prepared in batch]
        negative_prompts = [prepared.negative_prompt for prepared in batch]
        clip_skip = batch[0].request.clip_skip
        return text.encode(self._checkpoint.text_encoder, [*prompts, *negative_prompts], clip_skip)

    def _denoise(self, batch: Sequence[_Prepared], contexts: torch.Tensor) -> torch.Tensor:
        """Latents [batch, 4, height, width] in float32, as the noise is, whatever the UNet's type.

        Each image draws its noise from its own generator, on the CPU: it does not depend on the
        others in its batch, nor on the GPU.
        """
        unet, first = self._checkpoint.unet, batch[0].request
        schedule = euler.make_schedule(self._checkpoint.alphas_cumprod, first.steps)
        factor = self._checkpoint.vae_factor
        shape = (unet.config.in_channels, first.height // factor, first.width // factor)
        generators = [torch.Generator().manual_seed(row.request.seed) for row in batch]
        scales = torch.tensor([row.request.cfg_scale for row in batch], device=self._device)
        scales = scales[:, None, None, None]

        latents = self._noise(generators, shape) * schedule.sigmas[0]
        for at, timestep in enumerate(schedule.timesteps):
            sigma, next_sigma = schedule.sigmas[at], schedule.sigmas[at + 1]
            inputs = euler.scale_input(latents, sigma).to(unet.dtype).repeat(2, 1, 1, 1)
            times = torch.full((len(inputs),), timestep, device=self._device)
            output = unet(inputs, times, encoder_hidden_states=contexts, return_dict=False)[0]
            wanted, unwanted = output.float().chunk(2)
            guided = unwanted + scales * (wanted - unwanted)
            foreseen = euler.denoised(latents, guided, sigma, self._checkpoint.prediction_type)
            noise = self._noise(generators, shape) if next_sigma else None
            latents = euler.step(latents, foreseen, sigma, next_sigma, noise)
        return latents

    def _noise(
        self, generators: Sequence[torch.Generator], shape: tuple[int, int, int]
    ) -> torch.Tensor:
        rows = [torch.randn(shape, generator=generator) for generator in generators]
        return torch.stack(rows).to(self._device)

    def _decode(self, latents: torch.Tensor) -> list[contract.Outcome]:
        vae = self._checkpoint.vae
        images = self._decode_once(latents)
        if vae.dtype == torch.float16 and not images.isfinite().all() and latents.isfinite().all():
            log.warning(
                "the VAE overflows in float16: it decodes in float32 from now on",
                extra={"action": "vae_widened"},
            )
            vae.float()
            images = self._decode_once(latents)
        sound = images.isfinite().flatten(1).all(dim=1).tolist()
        levels = ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        pixels = levels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        return [
            row if is_sound else errors.TransientError("the image came out as NaN")
            for row, is_sound in zip(pixels, sound, strict=True)
        ]

    def _decode_once(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self._checkpoint.vae
        scaled = (latents / vae.config.scaling_factor).to(vae.dtype)
        images: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
        return images.float()

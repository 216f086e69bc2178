"""What is done to a request away from the GPU: checked, its prompts cut up, its LoRAs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imagefleet import errors
from imagefleet.job import chunks
from worker.engine import contract, sampler, text
from worker.engine.checkpoint import Checkpoint
from worker.engine.lora import cache, merge, names
from worker.engine.lora import file as lora_file

#: Each LoRA of an image is held in memory while it is drawn.
_MAX_LORAS = 16


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that an engine can begin at once."""

    request: contract.ImageRequest
    prompt: tuple[chunks.Chunk, ...]
    negative_prompt: tuple[chunks.Chunk, ...]
    loras: tuple[merge.Applied, ...]
    schedule: sampler.Schedule

    @property
    def group(self) -> tuple[object, ...]:
        """What two requests must have in common to share a call."""
        request = self.request
        loras = tuple(applied.key for applied in self.loras)
        calls = len(self.schedule.table)
        return (request.width, request.height, calls, request.clip_skip, loras)

    @property
    def text_loras(self) -> tuple[object, ...]:
        """What is merged into the text encoder: many LoRAs change the UNet alone."""
        return tuple(
            (applied.file.identity, weight)
            for applied in self.loras
            if (weight := applied.weights["text_encoder"]) and applied.file.changes["text_encoder"]
        )

    @property
    def pixels(self) -> int:
        return self.request.width * self.request.height


class RequestPreparer:
    """Prepares requests for one checkpoint; called from several threads."""

    def __init__(self, checkpoint: Checkpoint, lora_cache_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = text.Tokenizer(checkpoint.tokenizer)
        layers = names.Layers(checkpoint.unet, checkpoint.text_encoder)
        self._lora_cache = cache.LoraCache(layers, lora_cache_bytes)

    @property
    def default_size(self) -> tuple[int, int]:
        """The checkpoint's own width and height in pixels."""
        side = int(self._checkpoint.unet.config.sample_size) * self._checkpoint.vae_factor
        return side, side

    @property
    def lora_lookups(self) -> Mapping[str, int]:
        return self._lora_cache.lookups

    def prepare(self, request: contract.ImageRequest) -> Prepared:
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
        layers = self._checkpoint.text_encoder.config.num_hidden_layers
        if not 1 <= request.clip_skip <= layers:
            raise errors.JobError(
                f"clip_skip is {request.clip_skip}; this model's text encoder has {layers} layers"
            )
        schedule = sampler.make_schedule(
            request.sampler,
            request.steps,
            self._checkpoint.alphas_cumprod,
            self._checkpoint.prediction_type,
        )
        return Prepared(
            request,
            self._tokenizer.chunks(request.prompt),
            self._tokenizer.chunks(request.negative_prompt),
            self._read_loras(request.loras),
            schedule,
        )

    def _read_loras(self, loras: Sequence[contract.Lora]) -> tuple[merge.Applied, ...]:
        """A LoRA that is named twice counts twice; their order does not matter."""
        if len(loras) > _MAX_LORAS:
            raise errors.JobError(f"the prompt has {len(loras)} LoRAs; {_MAX_LORAS} at most")
        files: dict[lora_file.Identity, lora_file.LoraFile] = {}
        weights: dict[lora_file.Identity, dict[names.Network, float]] = {}
        for one in loras:
            file = self._lora_cache.get(one)
            files[file.identity] = file
            sums = weights.setdefault(file.identity, {"unet": 0.0, "text_encoder": 0.0})
            sums["unet"] += one.unet_weight
            sums["text_encoder"] += one.text_encoder_weight
        effective = [identity for identity in sorted(files) if any(weights[identity].values())]
        return tuple(merge.Applied(files[identity], weights[identity]) for identity in effective)

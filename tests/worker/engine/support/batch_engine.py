"""The oracle: a plain engine that runs alike requests as one batch, from noise to pixels.

diffusers' own UNet with AUTOMATIC1111's sizes, uncompiled, LoRAs merged into its weights: the
arithmetic that the slot engine is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

import a1111
from imagefleet import errors
from worker.engine import checkpoint, contract, device, sampler, text
from worker.engine import errors as engine_errors
from worker.engine.control.cache import ControlNets
from worker.engine.decoder import to_pixels
from worker.engine.lora import merge, shared
from worker.engine.lora.file import Network
from worker.engine.slots.prepare import PreparedRequest, RequestPreparer

#: Requests held per image of a batch.
_LOOKAHEAD_BATCHES = 2

#: Pixels decoded per VAE call: bounds its memory.
_DECODE_PIXELS = 1024 * 1024


def load_batch_engine(
    model: Path,
    *,
    max_batch: int = 8,
    precision: device.Precision = "auto",
    config: Path | None = None,
) -> BatchEngine:
    """Loads a checkpoint on the CPU and the batch engine on it."""
    cpu = torch.device("cpu")
    dtype = device.find_dtype(precision, cpu)
    return BatchEngine(checkpoint.load_checkpoint(model, cpu, dtype, config), max_batch)


def group(prepared: PreparedRequest) -> tuple[object, ...]:
    """What two requests must have in common to share a UNet call."""
    request = prepared.request
    loras = (prepared.lora_key, prepared.text_key)
    calls = len(prepared.schedule.table)
    return (request.width, request.height, calls, request.clip_skip, loras)


class BatchEngine:
    """Draws as a `contract.Engine` does; at most *max_batch* images start and finish together."""

    def __init__(self, loaded: checkpoint.Checkpoint, max_batch: int) -> None:
        self.checkpoint = loaded
        a1111.resize_last(loaded.unet)
        nets = ControlNets(loaded.unet, has_own_layers=False)
        self._preparer = RequestPreparer(loaded, {"unet": {}, "text_encoder": {}}, nets)
        self._encoder = text.Encoder(
            [text.Reader(loaded.text_encoder)],
            start=loaded.tokenizer.bos_token_id,
            end=loaded.tokenizer.eos_token_id,
        )
        networks = {"unet": loaded.unet, **loaded.text_encoders}
        self._mergers = {name: shared.Merger(each) for name, each in networks.items()}
        self._max_batch = max_batch
        self._pending: dict[int, PreparedRequest] = {}

    @property
    def model_name(self) -> str:
        return self.checkpoint.name

    @property
    def capacity(self) -> int:
        return self._max_batch * _LOOKAHEAD_BATCHES

    @property
    def free(self) -> int:
        return self.capacity - len(self._pending)

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def prepare(self, request: contract.ImageRequest) -> PreparedRequest:
        return self._preparer.prepare(request)

    def admit(self, ticket: int, prepared: PreparedRequest) -> None:
        self._pending[ticket] = prepared

    def tick(self) -> list[contract.Finished]:
        """Draws the oldest request and all that can share its UNet calls."""
        tickets = self._next_batch()
        batch = [self._pending.pop(ticket) for ticket in tickets]
        outcomes = self._run(batch)
        return [
            contract.Finished(*pair) for pair in zip(tickets, outcomes, strict=True)
        ]

    def activate(self, loras: Mapping[Network, Sequence[merge.AppliedLora]]) -> None:
        """Merges LoRAs into the networks; none restores them."""
        for network, merger in self._mergers.items():
            merger.activate(loras.get(network, ()))

    def _next_batch(self) -> list[int]:
        oldest = next(iter(self._pending.values()), None)
        if oldest is None:
            return []
        shared = group(oldest)
        alike = [
            ticket for ticket, other in self._pending.items() if group(other) == shared
        ]
        return alike[: self._max_batch]

    def _run(self, batch: Sequence[PreparedRequest]) -> list[contract.Outcome]:
        try:
            self.activate(batch[0].loras)
            return self._generate(batch)
        except Exception as error:  # noqa: BLE001 - any failure is this batch's outcome
            return [engine_errors.classify(error)] * len(batch)

    @torch.inference_mode()
    def _generate(self, batch: Sequence[PreparedRequest]) -> list[contract.Outcome]:
        unet, factor = self.checkpoint.unet, self.checkpoint.factor
        latents = denoise(unet, batch, self._encode_prompts(batch), factor)
        request = batch[0].request
        return decode(self.checkpoint.vae, latents, request.width * request.height)

    def _encode_prompts(self, batch: Sequence[PreparedRequest]) -> text.Context:
        """The rows of the prompts, then of the negative prompts."""
        prompts, negative_prompts = zip(
            *(
                tuple(next(iter(row.texts.values())) for row in prepared.text_rows)
                for prepared in batch
            ),
            strict=True,
        )
        first = batch[0]
        return self._encoder.encode(
            [*prompts, *negative_prompts],
            first.request.clip_skip,
            first.text_key,
        )


def denoise(
    unet: UNet2DConditionModel,
    images: Sequence[PreparedRequest],
    context: text.Context,
    vae_factor: int,
) -> torch.Tensor:
    """Latents [batch, 4, height, width] in float32.

    The images have the same size and number of UNet calls. *context* has the rows of the prompts,
    then of the negative prompts. Each image draws its noise from its own seed.
    """
    device = unet.device
    schedules = [image.schedule for image in images]
    streams = [image.noise(unet.config.in_channels, vae_factor) for image in images]
    starts = [
        image.first_latents(noise) for image, noise in zip(images, streams, strict=True)
    ]
    latents = torch.stack(starts).to(device)
    history = latents.new_zeros((sampler.HISTORY, *latents.shape))
    tables = torch.stack([schedule.table for schedule in schedules], dim=1).to(device)
    for call, rows in enumerate(tables):
        inputs = sampler.scale_input(rows, latents).to(unet.dtype)
        output = unet(
            inputs.repeat(2, 1, 1, 1),
            rows[:, sampler.TIMESTEP].repeat(2),
            encoder_hidden_states=context.vectors,
            encoder_attention_mask=None if context.mask.all() else context.mask,
            return_dict=False,
        )[0]
        cond, uncond = output.float().chunk(2)
        scales = _per_image([image.scales(call)[0] for image in images], device)
        guided = uncond + scales * (cond - uncond)
        noise = torch.zeros_like(latents, device="cpu")
        for image, stream, into in zip(images, streams, noise, strict=True):
            if image.schedule.noisy[call]:
                stream.fill(into)
        latents, history = sampler.step(
            rows, latents, guided, history, noise.to(device), uncond=uncond
        )
    return latents


def _per_image(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)[:, None, None, None]


def decode(
    vae: AutoencoderKL, latents: torch.Tensor, pixels: int
) -> list[contract.Outcome]:
    """Images of *pixels* from latents [batch, 4, height, width], or an error for NaN."""
    outcomes: list[contract.Outcome] = []
    for part in torch.split(latents, max(1, _DECODE_PIXELS // pixels)):
        scaled = (part / vae.config.scaling_factor).to(vae.dtype)
        levels, is_finite = to_pixels(vae.decode(scaled, return_dict=False)[0].float())
        for image, ok in zip(levels.numpy(), is_finite.tolist(), strict=True):
            outcomes.append(image if ok else errors.TransientError("the image is NaN"))
    return outcomes

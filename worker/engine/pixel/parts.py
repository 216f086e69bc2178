"""What one stage of a cascade in pixels has an engine do: its tick, and the engine's parts.

All images of a stage have one size; it has no VAE, LoRAs or ControlNets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from worker.engine import sampler
from worker.engine.control.held import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.kernels.compile import GraphPool
from worker.engine.lora.merge import Merger
from worker.engine.networks.transformer import SlotState
from worker.engine.pixel import schedules
from worker.engine.pixel.checkpoint import CHANNELS, PixelCheckpoint
from worker.engine.pixel.prepare import StagePreparer
from worker.engine.pixel.unet import PixelUnet
from worker.engine.slots.memory import WeightMode
from worker.engine.slots.parts import Parts, Settings
from worker.engine.slots.queue import AssembledLoras, Costs, NoiseLevel, SlotJob, Staged
from worker.engine.slots.staging import Stager

#: The column of the guidance scale, after the schedule's own columns.
_GUIDANCE = schedules.COLUMNS


def tick(
    unet: PixelUnet, _weight_mode: WeightMode, state: SlotState, _controls: Sequence[object]
) -> None:
    """One UNet call and one sampler step of all slots, in place.

    As in diffusers' pipelines the noise is guided, and the variance is the prompt's own.
    """
    rows = state.rows[..., None, None, None]
    x = sampler.scale_input(state.rows, state.latents).to(unet.dtype)
    if x.device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    if state.conditioning is not None:
        x = torch.cat([x, state.conditioning], dim=1)
    output = unet(x, state.rows[:, sampler.TIMESTEP], state.context, state.added)
    cond, uncond = output.float().unflatten(0, (-1, 2)).unbind(dim=1)
    predicted, variance = cond.split(CHANNELS, dim=1)
    unguided = uncond[:, :CHANNELS]
    guided = unguided + rows[:, _GUIDANCE] * (predicted - unguided)
    share = (variance + 1) / 2
    small, large = rows[:, schedules.SMALL_LOG], rows[:, schedules.LARGE_LOG]
    deviation = torch.exp(0.5 * (share * large + (1 - share) * small))
    stepped, remembered = sampler.step(
        state.rows[:, : sampler.COLUMNS],
        state.latents,
        guided,
        state.history,
        deviation * state.noise,
        limit=unet.limit,
    )
    state.latents.copy_(stepped)
    state.history.copy_(remembered)


class PixelStager(Stager):
    """Draws the first noise, and copies text states and the image that is upscaled."""

    @torch.no_grad()
    def _load(self, job: SlotJob, _loras: AssembledLoras) -> Staged:
        prepared = job.prepared
        noise = prepared.noise(self._channels, self._factor)
        images = prepared.first_latents(noise)
        upscaled: torch.Tensor | None = None
        level: NoiseLevel | None = None
        if (enlarged := prepared.enlarged) is not None:
            drawn = torch.empty_like(images)
            noise.fill(drawn)
            upscaled = self._copy(enlarged.with_noise(drawn))
            level = NoiseLevel(self._copy(torch.tensor([enlarged.level])))
        if prepared.states is None:
            raise RuntimeError("a stage's requests have text states")
        return Staged(
            self._copy(images),
            self._copy(prepared.states),
            noise,
            added=level,
            conditioning=upscaled,
        )


def of_pixels(checkpoint: PixelCheckpoint, settings: Settings) -> Parts:
    """The parts of an engine for a stage; all of its images have one size."""
    width, height = checkpoint.default_size
    device = checkpoint.unet.device
    limit = checkpoint.noise.limit_of(CHANNELS * width * height)
    control_nets = ControlNets(checkpoint.unet, is_compiled=False)
    return Parts(
        model=checkpoint,
        settings=replace(settings, blocks=1, compiled_modes=("shared",)),
        unet=PixelUnet(checkpoint.unet, limit, is_compiled=settings.backend is not None),
        tick=tick,
        preparer=StagePreparer(checkpoint),
        control_nets=control_nets,
        stager=PixelStager(checkpoint, control_nets),
        merger=Merger(checkpoint.unet, {}),
        decoder=Decoder(None),
        pool=GraphPool(device) if device.type == "cuda" else None,
        costs=Costs(),
    )

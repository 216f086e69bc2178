"""The parts of an engine that draws latents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderTiny
from torch import nn

from imagefleet import errors
from worker.engine.checkpoint import Checkpoint
from worker.engine.control.held import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.families import reading
from worker.engine.kernels import layers
from worker.engine.kernels.compile import GraphPool
from worker.engine.lora.merge import Merger
from worker.engine.networks import linear
from worker.engine.networks.unet import SlotUnet
from worker.engine.slots import memory, step
from worker.engine.slots.parts import Parts, Settings
from worker.engine.slots.prepare import RequestPreparer
from worker.engine.slots.queue import Costs
from worker.engine.slots.staging import LatentStager

#: Slots of low rank have room for LoRAs of it from the start; for others their memory grows.
_USUAL_RANK = 32


def _read_tiny(folder: Path, checkpoint: Checkpoint) -> AutoencoderTiny:
    """The TAESD of a folder, beside the checkpoint's VAE; raises SetupError if it is none."""
    try:
        tiny = AutoencoderTiny.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise errors.SetupError(f"--taesd {str(folder)!r}: {reading.brief(error)}") from error
    factor = 2 ** (len(tiny.config.decoder_block_out_channels) - 1)
    if (factor, tiny.config.latent_channels) != (checkpoint.factor, checkpoint.channels):
        raise errors.SetupError(f"--taesd {str(folder)!r} does not fit the model's latents")
    tiny.requires_grad_(requires_grad=False).eval()
    nn.Module.to(tiny, device=checkpoint.vae.device, dtype=checkpoint.vae.dtype)
    tiny.to(memory_format=torch.channels_last)
    return tiny


def of_latents(checkpoint: Checkpoint, settings: Settings) -> Parts:
    """The parts of an engine that draws latents."""
    device, is_compiled = checkpoint.unet.device, settings.backend is not None
    is_large = checkpoint.family.has_large_layers
    if is_compiled:
        layers.replace_group_norms(checkpoint.unet)
        layers.replace_group_norms(checkpoint.vae)
        layers.replace_upsamplers(checkpoint.vae)
    control_nets = ControlNets(checkpoint.unet, is_compiled=is_compiled)
    tiny = None if settings.taesd is None else _read_tiny(settings.taesd, checkpoint)
    stager = LatentStager(checkpoint, control_nets, tiny)
    layer_bytes = linear.transformer_bytes(checkpoint.unet)
    weights = settings.slot_weights or memory.choose_weights(
        device, layer_bytes, settings.slots, is_large=is_large
    )
    if weights == "reloaded":
        settings = replace(settings, slots=1, compiled_modes=("per_slot",))
    keeps_on_cpu = is_large and memory.has_no_room_for_originals(device, layer_bytes)
    merger = Merger(checkpoint.unet, keeps_on_cpu=keeps_on_cpu)
    unet = SlotUnet(checkpoint.unet, weights)
    unet.changes.grow_for_transformers(_USUAL_RANK)
    if is_compiled:
        unet.fold()
    preparer = RequestPreparer(
        checkpoint,
        {
            "unet": {**unet.groups, **unet.changes.groups},
            **{
                name: linear.group_by_shape(text_encoder)
                for name, text_encoder in checkpoint.text_encoders.items()
            },
        },
        control_nets,
    )
    pool = GraphPool(device) if device.type == "cuda" else None
    return Parts(
        model=checkpoint,
        settings=settings,
        unet=unet,
        tick=step.tick,
        preparer=preparer,
        control_nets=control_nets,
        stager=stager,
        merger=merger,
        decoder=Decoder(checkpoint.vae, checkpoint.factor, tiny, settings.backend, pool),
        pool=pool,
        costs=Costs(merge_seconds=1.0) if keeps_on_cpu else Costs(),
    )

"""The parts of an engine that draws latents."""

from dataclasses import replace

import torch
from diffusers import AutoencoderTiny
from torch import nn

from imagefleet.errors import SetupError
from worker.engine.checkpoint import Checkpoint
from worker.engine.contract import Settings
from worker.engine.control.cache import ControlNets
from worker.engine.decoder import Decoder
from worker.engine.families import reading
from worker.engine.kernels import layers
from worker.engine.lora.shared import Merger
from worker.engine.networks import linear
from worker.engine.networks.unet import SlotUnet
from worker.engine.passes.checkpoints import Caches, CheckpointCache, Read
from worker.engine.passes.images import Vaes
from worker.engine.slots import memory
from worker.engine.slots.parts import Parts
from worker.engine.slots.prepare import RequestPreparer
from worker.engine.slots.staging import ClipStager


def of_latents(
    checkpoint: Checkpoint, settings: Settings, read: Read | None = None
) -> Parts:
    """*read*: another checkpoint of its kind; None: it draws with this alone."""
    device = checkpoint.unet.device
    is_large = checkpoint.family.has_large_layers
    # Quicker on a GPU, compiled or not; a CPU keeps to what diffusers computes.
    has_own_layers = settings.packages is not None or device.type == "cuda"
    if has_own_layers:
        layers.replace_modules(checkpoint.unet, layers.group_norm)
        layers.replace_modules(checkpoint.vae, layers.group_norm, layers.upsampler)
    control_nets = ControlNets(checkpoint.unet, has_own_layers=has_own_layers)
    tiny: AutoencoderTiny | None = None
    if settings.taesd is not None:
        tiny = reading.read_network(AutoencoderTiny, settings.taesd)
        factor = 2 ** (len(tiny.config.decoder_block_out_channels) - 1)
        own = (checkpoint.factor, checkpoint.channels)
        if (factor, tiny.config.latent_channels) != own:
            raise SetupError(
                f"--taesd {str(settings.taesd)!r} does not fit the model's latents"
            )
        nn.Module.to(tiny, device=checkpoint.vae.device, dtype=checkpoint.vae.dtype)
        tiny.to(memory_format=torch.channels_last)
    vaes = Vaes(
        checkpoint.vae,
        overflows=checkpoint.family.overflows_in_float16,
        has_own_layers=has_own_layers,
    )
    others = read and CheckpointCache(checkpoint, read, has_own_layers=has_own_layers)
    caches = Caches(control_nets, vaes, others)
    stager = ClipStager(checkpoint, caches, tiny)
    layer_bytes = linear.transformer_bytes(checkpoint.unet)
    weights = settings.slot_weights or memory.choose_weights(
        device, layer_bytes, is_large=is_large
    )
    if weights == "reloaded":
        settings = replace(settings, slots=1, compiled_modes=("per_slot",))
    keeps_on_cpu = is_large and memory.has_no_room_for_originals(device, layer_bytes)
    merger = Merger(checkpoint.unet, keeps_on_cpu=keeps_on_cpu)
    unet = SlotUnet(checkpoint.unet, weights)
    if has_own_layers:
        unet.fold()
    preparer = RequestPreparer(
        checkpoint,
        {
            checkpoint.family.backbone: {**unet.groups, **unet.changes.groups},
            **{
                name: linear.group_by_shape(text_encoder)
                for name, text_encoder in checkpoint.text_encoders.items()
            },
        },
        caches,
    )
    return Parts(
        model=checkpoint,
        settings=settings,
        unet=unet,
        preparer=preparer,
        caches=caches,
        stager=stager,
        merger=merger,
        decoder=Decoder(checkpoint.vae, checkpoint.factor, tiny),
    )

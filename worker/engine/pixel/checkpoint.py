"""Loads one stage of a cascade in pixels: a folder in diffusers' format, as DeepFloyd IF's are.

A stage is a UNet and a DDPM scheduler, and with `IFSuperResolutionPipeline` one more scheduler for
the noise on the image that it upscales. Its text encoder may be there or not (`text_states`); its
safety checker and its watermark are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import nn

from imagefleet import errors
from imagefleet.telemetry import logs
from worker.engine import checkpoint
from worker.engine.families import reading, table
from worker.engine.pixel import schedules, text_stage
from worker.engine.pixel.schedules import NoiseSchedule
from worker.engine.pixel.step import CHANNELS

#: What a family is called, by the class of its pipeline.
FAMILIES = {"IFPipeline": "if", "IFSuperResolutionPipeline": "if_sr"}

#: IF's native sizes by the pipeline's class, where the configuration has none.
_SIDES = {"IFPipeline": 64, "IFSuperResolutionPipeline": 256}


@dataclass(frozen=True, slots=True)
class PixelCheckpoint:
    """One stage on its device."""

    name: str
    family: str
    folder: Path
    unet: UNet2DConditionModel
    noise: NoiseSchedule
    image_noise: NoiseSchedule | None
    """The noise on the image that it upscales; None for a base stage."""
    default_size: tuple[int, int]
    """The only width and height in pixels that it draws."""
    text_width: int
    encoder: str
    """The name of its text encoder."""


def load_checkpoint(folder: Path, device: torch.device, dtype: torch.dtype) -> PixelCheckpoint:
    """Loads a stage.

    Raises:
        SetupError: something is missing, damaged or of another architecture.
    """
    logs.take_over_libraries()
    checkpoint.hide_progress_bars()
    if text_stage.has_encoder(folder):
        text_stage.require_libraries(folder)
    name = folder.resolve().name
    pipeline = table.pipeline_of(folder)
    if pipeline not in FAMILIES:
        raise errors.SetupError(f"{str(folder)!r} is not a stage of DeepFloyd IF")
    upscales = FAMILIES[pipeline] == "if_sr"
    unet = reading.read_network(UNet2DConditionModel, folder / "unet")
    _check_architecture(folder, unet, upscales=upscales)
    noise = _read_scheduler(folder, "scheduler")
    image_noise = _read_scheduler(folder, "image_noising_scheduler") if upscales else None
    unet.requires_grad_(requires_grad=False).eval()
    nn.Module.to(unet, dtype=dtype)
    try:
        nn.Module.to(unet, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise errors.SetupError(
            f"the GPU's memory is too short for the model: {reading.brief(error)}"
        ) from error
    if device.type == "cuda":
        unet.to(memory_format=torch.channels_last)
    else:
        # Not mapped from the file: truncating it would kill the process.
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
    side = unet.config.sample_size or _SIDES[pipeline]
    return PixelCheckpoint(
        name=name,
        family=FAMILIES[pipeline],
        folder=folder,
        unet=unet,
        noise=noise,
        image_noise=image_noise,
        default_size=(side, side),
        text_width=unet.config.encoder_hid_dim or unet.config.cross_attention_dim,
        encoder=text_stage.encoder_name(folder),
    )


def _read_scheduler(folder: Path, part: str) -> NoiseSchedule:
    config = reading.read_json(folder / part / "scheduler_config.json")
    if not config:
        raise errors.SetupError(f"{str(folder)!r} has no {part}/scheduler_config.json")
    return schedules.read_scheduler(config, f"{folder.name}/{part}")


def _check_architecture(folder: Path, unet: Any, *, upscales: bool) -> None:
    own = unet.config
    expected = {
        "in_channels": CHANNELS * (1 + upscales),
        "out_channels": 2 * CHANNELS,
        "addition_embed_type": "text",
        "class_embed_type": "timestep" if upscales else None,
        "class_embeddings_concat": False,
        "center_input_sample": False,
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "encoder_hid_dim_type": "text_proj" if own.encoder_hid_dim else None,
    }
    for key, value in expected.items():
        if own[key] != value:
            raise errors.SetupError(
                f"{str(folder)!r} does not have DeepFloyd IF's architecture: {key} is {own[key]!r}"
                f" in unet/config.json, not {value!r}"
            )
    blocks = {*own.down_block_types, *own.up_block_types}
    known = ("Resnet", "SimpleCrossAttn")
    if others := sorted(each for each in blocks if not each.startswith(known)):
        raise errors.SetupError(
            f"{str(folder)!r} does not have DeepFloyd IF's architecture: its UNet has {others[0]}"
        )
    if not isinstance(own.sample_size or 0, int):
        raise errors.SetupError(f"{str(folder)!r} has no native size: sample_size must be a number")

"""Loads one stage of a cascade in pixels: a folder in diffusers' format, as DeepFloyd IF's are.

A stage is a UNet and a DDPM scheduler, and with `IFSuperResolutionPipeline` one more scheduler for
the noise on the image that it upscales. Its text encoder may be there or not (`text_states`); its
safety checker and its watermark are not used.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

from imagefleet.errors import SetupError
from imagefleet.validation import JSONDict
from worker.engine import checkpoint
from worker.engine.families import prompts, reading, table
from worker.engine.families.reading import ImageNoise
from worker.engine.families.table import Family, Model
from worker.engine.pixel import schedules, text_stage, text_states

#: Red, green and blue; the UNet predicts the variance of each as well.
CHANNELS = 3

#: A stage's family, by the class of its pipeline.
_IF = Family(
    "DeepFloyd IF", "if", plain_tokens=text_states.TOKENS, long_tokens=(), must_fit=True
)
FAMILIES = {
    "IFPipeline": _IF,
    "IFSuperResolutionPipeline": replace(
        _IF, name="DeepFloyd IF's upscaler", slug="if_sr", enlarges_image=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class PixelCheckpoint(Model):
    """One stage on its device, which draws one size alone."""

    folder: Path
    noise: DDPMScheduler
    text_width: int
    #: The name of its text encoder.
    encoder: str

    @property
    def channels(self) -> int:
        return CHANNELS


def load_checkpoint(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> PixelCheckpoint:
    """Loads a stage; raises SetupError if it lacks something, is damaged or built otherwise."""
    has_encoder = prompts.has_encoder(folder, text_stage.KIND)
    if has_encoder:
        text_stage.require_libraries(folder)
    family = FAMILIES[table.pipeline_of(folder)]
    unet = reading.read_network(UNet2DConditionModel, folder / "unet")
    _check_architecture(folder, unet, upscales=family.enlarges_image)
    config = _scheduler_config(folder, "scheduler")
    noise = schedules.read_scheduler(config, folder.name)
    image_noise = None
    if family.enlarges_image:
        config = _scheduler_config(folder, "image_noising_scheduler")
        scheduler = DDPMScheduler.from_config(config)
        image_noise = ImageNoise(
            scheduler, int(scheduler.config.num_train_timesteps) - 1
        )
    checkpoint.place(folder, {"unet": unet}, {"unet": (device, dtype)})
    side = unet.config.sample_size
    encoder = text_stage.encoder_name(folder)
    return PixelCheckpoint(
        name=folder.resolve().name,
        family=family,
        folder=folder,
        unet=unet,
        noise=noise,
        image_noise=image_noise,
        default_size=(side, side),
        factor=1,
        text_width=unet.config.encoder_hid_dim or unet.config.cross_attention_dim,
        encoder=encoder,
        states_encoder=None if has_encoder else encoder,
    )


def _scheduler_config(folder: Path, part: str) -> JSONDict:
    config = reading.read_json(folder / part / "scheduler_config.json")
    if not config:
        raise SetupError(f"{str(folder)!r} has no {part}/scheduler_config.json")
    return config


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
    others = [
        f"{key} is {own[key]!r}" for key, value in expected.items() if own[key] != value
    ]
    blocks = (*own.down_block_types, *own.up_block_types)
    others += [
        f"it has a {each}"
        for each in blocks
        if not each.startswith(("Resnet", "SimpleCrossAttn"))
    ]
    if not isinstance(own.sample_size, int):
        others.append("sample_size is no number")
    if others:
        raise SetupError(
            f"the UNet of {str(folder)!r} does not have DeepFloyd IF's architecture: {others[0]}"
        )

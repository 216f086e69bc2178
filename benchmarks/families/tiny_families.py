"""Tiny random checkpoints of SD2's, SDXL's and the x4 upscaler's architecture.

As `tiny_model` makes SD1.5's.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import tiny_model
from imagefleet.job import clip

FamilyName = Literal["sd1", "sd2", "sdxl"]

_WIDTH, _SECOND_WIDTH = 32, 48

#: The noise of the published x4 upscaler, on latents and on the image alike.
_UPSCALER_NOISE = {**tiny_model.SCHEDULER, "beta_start": 0.0001, "beta_end": 0.02}


_SD2_UNET: Mapping[str, Any] = {
    "attention_head_dim": (2, 2, 4, 4),
    "use_linear_projection": True,
}

#: With two layers per block, as SDXL has, so that single files convert.
_SDXL_UNET: Mapping[str, Any] = {
    "block_out_channels": (32, 32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 1, 2),
    "cross_attention_dim": _WIDTH + _SECOND_WIDTH,
    "attention_head_dim": (2, 2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": _SECOND_WIDTH + 6 * 8,
}


def build(
    folder: Path,
    family: FamilyName,
    *,
    size: int = 64,
    unet_changes: Mapping[str, Any] = MappingProxyType({}),
    **scheduler: Any,
) -> Path:
    """Writes a random checkpoint of a family in diffusers format; returns its folder.

    *unet_changes* and *scheduler* are added to their configurations, such as prediction_type. They
    have CLIP's tokenizer.
    """
    config = {**tiny_model.SCHEDULER, **scheduler}
    if family == "sd1":
        tiny_model.build_tiny_checkpoint(
            folder, size=size, clips_tokenizer=True, **unet_changes
        )
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
        return folder
    is_sdxl = family == "sdxl"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        networks: dict[str, Any] = {
            "unet": tiny_model.make_unet(
                size, **{**(_SDXL_UNET if is_sdxl else _SD2_UNET), **unet_changes}
            ),
            "vae": tiny_model.make_vae(size, 0.13025 if is_sdxl else 0.18215),
            "text_encoder": _text_encoder(_WIDTH, "quick_gelu" if is_sdxl else "gelu"),
        }
        if is_sdxl:
            networks["text_encoder_2"] = _text_encoder(
                _SECOND_WIDTH, "gelu", is_second=True
            )
    pipeline = "StableDiffusionXLPipeline" if is_sdxl else "StableDiffusionPipeline"
    tiny_model.save(folder, pipeline, networks, {"scheduler": config})
    return folder


def build_refiner(
    folder: Path, base: Path, *, size: int = 64, **unet_changes: Any
) -> Path:
    """Writes a refiner for a tiny SDXL, with its VAE; with four levels, as SDXL's own has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        networks: dict[str, Any] = {
            "unet": _refiner_unet(size, unet_changes),
            "vae": AutoencoderKL.from_pretrained(base / "vae"),
            "text_encoder_2": _text_encoder(_SECOND_WIDTH, "gelu", is_second=True),
        }
    scheduler = json.loads((base / "scheduler" / "scheduler_config.json").read_text())
    pipeline = "StableDiffusionXLImg2ImgPipeline"
    tiny_model.save(
        folder,
        pipeline,
        networks,
        {"scheduler": scheduler},
        requires_aesthetics_score=True,
    )
    return folder


def build_inpainting(folder: Path, ordinary: Path) -> Path:
    """Writes an inpainting checkpoint: a random first layer, and else an ordinary one's weights.

    Its UNet takes a mask and a masked image's latents beside its own.
    """
    shutil.copytree(ordinary, folder)
    unet: Any = UNet2DConditionModel.from_pretrained(ordinary / "unet")
    channels = 2 * unet.config.in_channels + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wider: Any = UNet2DConditionModel.from_config(
            {**unet.config, "in_channels": channels}
        )
    weights = {
        key: weight
        for key, weight in unet.state_dict().items()
        if key != "conv_in.weight"
    }
    wider.load_state_dict(weights, strict=False)
    wider.save_pretrained(folder / "unet")
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = index["_class_name"].replace("Pipeline", "InpaintPipeline")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def build_upscaler(folder: Path, *, size: int = 64, **unet_changes: Any) -> Path:
    """Writes an x4 upscaler, as diffusers' `StableDiffusionUpscalePipeline` reads it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        networks: dict[str, Any] = {
            "unet": _upscaler_unet(size, unet_changes),
            "vae": tiny_model.make_vae(size, 0.08333, (16, 16, 32)),
            "text_encoder": _text_encoder(_WIDTH, "gelu"),
        }
    schedulers: dict[str, dict[str, Any]] = {
        "scheduler": {
            "_class_name": "DDIMScheduler",
            "prediction_type": "v_prediction",
            "clip_sample": False,
            "set_alpha_to_one": False,
        },
        "low_res_scheduler": {"_class_name": "DDPMScheduler"},
    }
    schedulers = {
        part: {**_UPSCALER_NOISE, **each} for part, each in schedulers.items()
    }
    pipeline = "StableDiffusionUpscalePipeline"
    tiny_model.save(folder, pipeline, networks, schedulers, max_noise_level=350)
    return folder


def _upscaler_unet(size: int, changes: Mapping[str, Any]) -> UNet2DConditionModel:
    config = {
        "sample_size": size // 4,
        "in_channels": 7,
        "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * 3),
        "up_block_types": (*["CrossAttnUpBlock2D"] * 3, "UpBlock2D"),
        "num_class_embeds": 1000,
        "only_cross_attention": (True, True, True, False),
        "use_linear_projection": True,
    }
    return tiny_model.make_unet(size, **{**config, **changes})


def _refiner_unet(size: int, changes: Mapping[str, Any]) -> UNet2DConditionModel:
    config = {
        "block_out_channels": (32, 32, 64, 64),
        "down_block_types": (
            "DownBlock2D",
            *["CrossAttnDownBlock2D"] * 2,
            "DownBlock2D",
        ),
        "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 2, "UpBlock2D"),
        "layers_per_block": 2,
        "transformer_layers_per_block": 2,
        "cross_attention_dim": _SECOND_WIDTH,
        "attention_head_dim": (2, 2, 4, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": _SECOND_WIDTH + 5 * 8,
    }
    return tiny_model.make_unet(size, **{**config, **changes})


def _text_encoder(width: int, activation: str, *, is_second: bool = False) -> Any:
    tokenizer = CLIPTokenizer.from_pretrained(clip.TOKENIZER)
    made = CLIPTextModelWithProjection if is_second else CLIPTextModel
    return tiny_model.make_text_encoder(
        tokenizer, made, width, 3, hidden_act=activation, projection_dim=width
    )

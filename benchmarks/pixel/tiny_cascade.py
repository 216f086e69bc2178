"""Tiny random stages with DeepFloyd IF's architecture: a base, a super-resolution stage, a T5.

All modules are IF's, so that tests exercise the real code paths; only the widths differ.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from transformers import T5Config, T5EncoderModel, T5Tokenizer

StageName = Literal["base", "sr"]

#: Pixels on a side.
BASE_SIDE, SR_SIDE = 16, 32

_TEXT_WIDTH = 32

#: As `google/t5-v1_1-xxl` in the configuration of IF's text encoder.
ENCODER = "tiny-t5"

#: What the UNets of all IF's stages have in common.
IF_UNET: dict[str, Any] = {
    "out_channels": 6,
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "addition_embed_type": "text",
    "cross_attention_norm": "group_norm",
    "resnet_time_scale_shift": "scale_shift",
    "act_fn": "gelu",
}

_PIPELINES = {"base": "IFPipeline", "sr": "IFSuperResolutionPipeline"}


def build(
    folder: Path, stage: StageName, *, has_encoder: bool = True, seed: int = 0, **scheduler: Any
) -> Path:
    """Writes a random stage in diffusers format; returns its folder.

    The same seed gives the same weights. *scheduler* changes its scheduler's configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make_unet(stage).save_pretrained(folder / "unet")
        if has_encoder:
            build_text_encoder(folder)
    make_scheduler(stage, **scheduler).save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {
        "_class_name": _PIPELINES[stage],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"] if has_encoder else [None, None],
        "tokenizer": ["transformers", "T5Tokenizer"] if has_encoder else [None, None],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
        "watermarker": [None, None],
        "requires_safety_checker": False,
    }
    if stage == "sr":
        DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(
            folder / "image_noising_scheduler"
        )
        index["image_noising_scheduler"] = ["diffusers", "DDPMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def make_scheduler(stage: StageName, **changes: Any) -> DDPMScheduler:
    """The scheduler of IF's stages."""
    config = {
        "beta_schedule": "squaredcos_cap_v2",
        "variance_type": "learned_range",
        "prediction_type": "epsilon",
        "thresholding": True,
        "dynamic_thresholding_ratio": 0.95,
        "sample_max_value": 1.5 if stage == "base" else 1.0,
    }
    return DDPMScheduler(**{**config, **changes})


def make_unet(stage: StageName) -> UNet2DConditionModel:
    """A UNet with attentions to image and text at the lower of two resolutions."""
    own: dict[str, Any] = {"sample_size": BASE_SIDE, "in_channels": 3}
    if stage == "sr":
        own = {
            "sample_size": SR_SIDE,
            "in_channels": 6,
            "class_embed_type": "timestep",
            "mid_block_scale_factor": 1.414,
            "time_embedding_act_fn": "gelu",
            "only_cross_attention": (False, True),
        }
    unet = UNet2DConditionModel(
        **IF_UNET,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        cross_attention_dim=96,
        encoder_hid_dim=_TEXT_WIDTH,
        attention_head_dim=8,
        addition_embed_type_num_heads=2,
        **own,
    )
    with torch.no_grad():
        # A variance far outside its bounds, as random weights predict it, would drown the image.
        unet.conv_out.weight[3:] /= 4
    return unet


def build_text_encoder(folder: Path) -> None:
    """Writes a T5 and its tokenizer, whose tokens are letters."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary += [(letter, -3.0) for letter in letters]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0)
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=_TEXT_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    encoder = T5EncoderModel(config)
    encoder.save_pretrained(folder / "text_encoder")
    path = folder / "text_encoder" / "config.json"
    stated = json.loads(path.read_text()) | {"_name_or_path": f"tiny/{ENCODER}"}
    path.write_text(json.dumps(stated))
    tokenizer.save_pretrained(folder / "tokenizer")

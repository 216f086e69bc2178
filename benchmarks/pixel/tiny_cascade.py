"""Tiny random stages with DeepFloyd IF's architecture: a base, a super-resolution stage, a T5.

All modules are IF's, so that tests exercise the real code paths; only the widths differ.
"""

import json
import string
from collections.abc import Iterable
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
    folder: Path,
    stage: StageName,
    *,
    has_encoder: bool = True,
    seed: int = 0,
    **scheduler: Any,
) -> Path:
    """Writes a random stage in diffusers format; returns its folder.

    The same seed gives the same weights. *scheduler* changes its scheduler's configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make_unet(stage).save_pretrained(folder / "unet")
        if has_encoder:
            tokenizer = make_tokenizer()
            encoder = make_text_encoder(
                tokenizer, d_model=_TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2
            )
            save_text_encoder(
                folder, encoder, tokenizer, _name_or_path=f"tiny/{ENCODER}"
            )
    save_index(
        folder, stage, make_scheduler(stage, **scheduler), has_encoder=has_encoder
    )
    return folder


def save_index(
    folder: Path,
    stage: StageName,
    scheduler: DDPMScheduler,
    *,
    has_encoder: bool = True,
) -> None:
    """Writes a stage's schedulers, and which parts diffusers' pipeline has."""
    index: dict[str, Any] = {
        "_class_name": _PIPELINES[stage],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"]
        if has_encoder
        else [None, None],
        "tokenizer": ["transformers", "T5Tokenizer"] if has_encoder else [None, None],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
        "watermarker": [None, None],
        "requires_safety_checker": False,
    }
    scheduler.save_pretrained(folder / "scheduler")
    if stage == "sr":
        noising = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
        noising.save_pretrained(folder / "image_noising_scheduler")
        index["image_noising_scheduler"] = ["diffusers", "DDPMScheduler"]
    (folder / "model_index.json").write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n"
    )


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


def make_tokenizer(words: Iterable[str] = ()) -> T5Tokenizer:
    """T5's tokenizer with *words* as its pieces, and letters for all others."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    vocabulary += [(f"▁{word}", -4.0) for word in words]
    vocabulary += [(letter, -8.0) for letter in letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def make_text_encoder(tokenizer: T5Tokenizer, **config: Any) -> T5EncoderModel:
    """A random encoder with T5 v1.1's architecture."""
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1}
    gated = {"num_heads": 4, "feed_forward_proj": "gated-gelu"}
    return T5EncoderModel(T5Config(**tokens, **gated, **config))


def save_text_encoder(
    folder: Path, encoder: T5EncoderModel, tokenizer: T5Tokenizer, **stated: Any
) -> None:
    """Writes a stage's text encoder, with more that is *stated* in its configuration."""
    encoder.save_pretrained(folder / "text_encoder")
    path = folder / "text_encoder" / "config.json"
    config = json.loads(path.read_text()) | stated
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder / "tokenizer")

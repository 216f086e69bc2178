"""The cascade's networks: DeepFloyd IF's architecture, far fewer channels.

A base draws 16x16 pixels, a second stage 64x64 pixels of them. Both take the states of a T5 encoder
whose pieces are the words of the drawn world.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Literal

from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from demo_world import captions
from pixel.tiny_cascade import IF_UNET

StageName = Literal["base", "sr"]

#: Pixels on a side.
SIDES: dict[StageName, int] = {"base": 16, "sr": 64}

#: Of a prompt, as IF was trained (`worker.engine.pixel.text_states`).
TOKENS = 77

TEXT_WIDTH = 96

#: What the configuration of the text encoder says it is called.
ENCODER = "demo-t5"

_PIPELINES = {"base": "IFPipeline", "sr": "IFSuperResolutionPipeline"}


def build_tokenizer() -> T5Tokenizer:
    """T5's tokenizer with the world's words as its pieces, and letters for all others."""
    words = sorted(captions.world_words())
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    vocabulary += [(f"▁{word}", -4.0) for word in words]
    vocabulary += [(letter, -8.0) for letter in letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def build_text_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=24,
        d_ff=192,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    encoder = T5EncoderModel(config)
    # T5's own start, a deviation of 1, is for an optimizer without momentum.
    nn.init.normal_(encoder.shared.weight, std=0.3)
    return encoder


def build_unet(stage: StageName) -> UNet2DConditionModel:
    own: dict[str, Any] = {
        "in_channels": 3,
        "block_out_channels": (48, 64, 64),
        "down_block_types": ("ResnetDownsampleBlock2D",) + ("SimpleCrossAttnDownBlock2D",) * 2,
        "up_block_types": ("SimpleCrossAttnUpBlock2D",) * 2 + ("ResnetUpsampleBlock2D",),
        "norm_num_groups": 16,
    }
    if stage == "sr":
        own = {
            "in_channels": 6,
            "block_out_channels": (24, 32, 48, 64),
            "down_block_types": ("ResnetDownsampleBlock2D",) * 3 + ("SimpleCrossAttnDownBlock2D",),
            "up_block_types": ("SimpleCrossAttnUpBlock2D",) + ("ResnetUpsampleBlock2D",) * 3,
            "norm_num_groups": 8,
            "class_embed_type": "timestep",
            "time_embedding_act_fn": "gelu",
            "mid_block_scale_factor": 1.414,
        }
    return UNet2DConditionModel(
        sample_size=SIDES[stage],
        **IF_UNET,
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        encoder_hid_dim=TEXT_WIDTH,
        attention_head_dim=32,
        addition_embed_type_num_heads=4,
        **own,
    )


def make_scheduler(stage: StageName) -> DDPMScheduler:
    """The scheduler of IF's stage of that name.

    The second stage predicts the velocity. With the noise, as IF does, small errors at the first
    timesteps become wrong colours, and it takes far more training until they are small.
    """
    return DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        variance_type="learned_range",
        prediction_type="epsilon" if stage == "base" else "v_prediction",
        thresholding=True,
        dynamic_thresholding_ratio=0.95,
        sample_max_value=1.5 if stage == "base" else 1.0,
    )


def tokenize(tokenizer: T5Tokenizer, texts: list[str]) -> Tensor:
    """Token ids [texts, TOKENS], as the pixel engine's text stage makes them."""
    tokens = tokenizer(
        texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    )
    ids: Tensor = tokens.input_ids
    return ids


def encode(encoder: T5EncoderModel, ids: Tensor) -> Tensor:
    """Text states [B, TOKENS, TEXT_WIDTH] of token ids [B, TOKENS]."""
    states: Tensor = encoder(ids, attention_mask=(ids != 0).long())[0]
    return states


def save_stage(
    folder: Path,
    stage: StageName,
    unet: UNet2DConditionModel,
    encoder: T5EncoderModel,
    tokenizer: T5Tokenizer,
) -> None:
    """Writes a stage in diffusers' format, with float16 weights."""
    nn.Module.half(unet).save_pretrained(folder / "unet")
    nn.Module.half(encoder).save_pretrained(folder / "text_encoder")
    config_file = folder / "text_encoder" / "config.json"
    # diffusers' pipelines mix no types: without a request, all of them load as float32.
    config = json.loads(config_file.read_text())
    config |= {"_name_or_path": f"imagefleet/{ENCODER}", "dtype": "float32"}
    config["clean_caption"] = False  # it has learned captions as they are
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder / "tokenizer")
    make_scheduler(stage).save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {
        "_class_name": _PIPELINES[stage],
        "feature_extractor": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "watermarker": [None, None],
    }
    if stage == "sr":
        noising = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
        noising.save_pretrained(folder / "image_noising_scheduler")
        index["image_noising_scheduler"] = ["diffusers", "DDPMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

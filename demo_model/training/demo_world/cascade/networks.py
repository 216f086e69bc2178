"""The cascade's networks: DeepFloyd IF's architecture, far fewer channels.

A base draws 16x16 pixels, a second stage 64x64 pixels of them. Both take the states of a T5 encoder
whose pieces are the words of the drawn world.
"""

from pathlib import Path
from typing import Any

from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import T5EncoderModel, T5Tokenizer

from demo_world import captions
from pixel import tiny_cascade
from pixel.tiny_cascade import StageName

#: Pixels on a side.
SIDES: dict[StageName, int] = {"base": 16, "sr": 64}

#: Of a prompt, as IF was trained (`worker.engine.pixel.text_states`).
TOKENS = 77

TEXT_WIDTH = 96

#: What the configuration of the text encoder says it is called.
ENCODER = "demo-t5"


def build_tokenizer() -> T5Tokenizer:
    return tiny_cascade.make_tokenizer(sorted(captions.world_words()))


def build_text_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    encoder = tiny_cascade.make_text_encoder(
        tokenizer, d_model=TEXT_WIDTH, d_kv=24, d_ff=192, num_layers=3, dropout_rate=0.0
    )
    # T5's own start, a deviation of 1, is for an optimizer without momentum.
    nn.init.normal_(encoder.shared.weight, std=0.3)
    return encoder


def build_unet(stage: StageName) -> UNet2DConditionModel:
    own: dict[str, Any] = {
        "in_channels": 3,
        "block_out_channels": (48, 64, 64),
        "down_block_types": ("ResnetDownsampleBlock2D",)
        + ("SimpleCrossAttnDownBlock2D",) * 2,
        "up_block_types": ("SimpleCrossAttnUpBlock2D",) * 2
        + ("ResnetUpsampleBlock2D",),
        "norm_num_groups": 16,
    }
    if stage == "sr":
        own = {
            "in_channels": 6,
            "block_out_channels": (24, 32, 48, 64),
            "down_block_types": ("ResnetDownsampleBlock2D",) * 3
            + ("SimpleCrossAttnDownBlock2D",),
            "up_block_types": ("SimpleCrossAttnUpBlock2D",)
            + ("ResnetUpsampleBlock2D",) * 3,
            "norm_num_groups": 8,
            "class_embed_type": "timestep",
            "time_embedding_act_fn": "gelu",
            "mid_block_scale_factor": 1.414,
        }
    return UNet2DConditionModel(
        sample_size=SIDES[stage],
        **tiny_cascade.IF_UNET,
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
    kind = "epsilon" if stage == "base" else "v_prediction"
    return tiny_cascade.make_scheduler(stage, prediction_type=kind)


def tokenize(tokenizer: T5Tokenizer, texts: list[str]) -> Tensor:
    """Token ids [texts, TOKENS], as the pixel engine's text stage makes them."""
    tokens = tokenizer(
        texts,
        padding="max_length",
        max_length=TOKENS,
        truncation=True,
        return_tensors="pt",
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
    tiny_cascade.save_text_encoder(
        folder,
        nn.Module.half(encoder),
        tokenizer,
        _name_or_path=f"imagefleet/{ENCODER}",
        dtype="float32",  # diffusers' pipelines mix no types: without a request, all load as this
        clean_caption=False,  # it has learned captions as they are
    )
    tiny_cascade.save_index(folder, stage, make_scheduler(stage))

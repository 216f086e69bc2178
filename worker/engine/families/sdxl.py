"""SDXL: CLIP's and OpenCLIP-bigG's text encoders, and the image's size as an input of the UNet."""

from __future__ import annotations

import torch

from worker.engine import text
from worker.engine.families import open_clip, sd1
from worker.engine.families.family import Family, TextEncoder, read_clip

UNET_CONFIG = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE_CONFIG = sd1.VAE_CONFIG | {"sample_size": 1024, "scaling_factor": 0.13025}
SECOND_TEXT_CONFIG = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}

#: The layer of the text encoders' output: both give their penultimate layer as it is, whatever
#: `clip_skip` says, as in AUTOMATIC1111.
_LAYER = 2


def size_ids(width: int, height: int) -> torch.Tensor:
    """The original size, the crop's corner and the target size, as AUTOMATIC1111 sends them."""
    return torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)


SDXL = Family(
    name="SDXL",
    slug="sdxl",
    unet_config=UNET_CONFIG,
    vae_config=VAE_CONFIG,
    text_encoders=(
        TextEncoder(
            network="text_encoder",
            config=sd1.TEXT_CONFIG,
            prefix="conditioner.embedders.0.transformer.",
            convert=read_clip,
            rules=text.Rules(layer=_LAYER, is_normalised=False),
        ),
        TextEncoder(
            network="text_encoder_2",
            config=SECOND_TEXT_CONFIG,
            prefix="conditioner.embedders.1.model.",
            convert=open_clip.read,
            rules=text.Rules(
                padding=open_clip.PADDING, layer=_LAYER, is_normalised=False, has_pooled=True
            ),
        ),
    ),
    has_size_ids=True,
    zeroes_empty_negative=True,
    overflows_in_float16=True,
    has_large_layers=True,
)

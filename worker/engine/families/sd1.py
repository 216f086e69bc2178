"""Stable Diffusion 1.x: CLIP's text encoder, whose last layers a job may skip."""

from __future__ import annotations

from worker.engine import text
from worker.engine.families.family import Family, TextEncoder, read_clip

UNET_CONFIG = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
VAE_CONFIG = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
TEXT_CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}

SD1 = Family(
    name="Stable Diffusion 1.x",
    slug="sd1",
    unet_config=UNET_CONFIG,
    vae_config=VAE_CONFIG,
    text_encoders=(
        TextEncoder(
            network="text_encoder",
            config=TEXT_CONFIG,
            prefix="cond_stage_model.transformer.",
            convert=read_clip,
            rules=text.Rules(),
        ),
    ),
)

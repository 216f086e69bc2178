"""Stable Diffusion's x4 upscaler: SD2's text encoder, and a UNet that sees the image it enlarges.

Its latents have the size of that image, which comes in with some noise beside them, and its VAE
makes four times the width and height of them. The configurations are those of
`stabilityai/stable-diffusion-x4-upscaler`.
"""

from __future__ import annotations

from dataclasses import replace

from worker.engine.families import sd1
from worker.engine.families.sd2 import SD2

#: What the UNet takes beside the latents: red, green and blue.
IMAGE_CHANNELS = 3

UNET_CONFIG = {
    "sample_size": 128,
    "in_channels": 4 + IMAGE_CHANNELS,
    "cross_attention_dim": 1024,
    "attention_head_dim": 8,
    "block_out_channels": [256, 512, 512, 1024],
    "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 3],
    "up_block_types": [*["CrossAttnUpBlock2D"] * 3, "UpBlock2D"],
    "num_class_embeds": 1000,
    "only_cross_attention": [True, True, True, False],
    "use_linear_projection": True,
}
VAE_CONFIG = sd1.VAE_CONFIG | {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [128, 256, 512],
    "sample_size": 256,
    "scaling_factor": 0.08333,
}

#: The noise schedule of the latents, and of the image.
SCHEDULER_CONFIG = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "scaled_linear"}

X4_UPSCALER = replace(
    SD2,
    name="Stable Diffusion x4 upscaler",
    slug="x4_upscaler",
    unet_config=UNET_CONFIG,
    vae_config=VAE_CONFIG,
    scheduler_config=SCHEDULER_CONFIG,
    # "The decoder seems to break in half precision", says its own configuration (x4-upscaling.yaml
    # in Stability-AI/stablediffusion); diffusers' pipeline decodes in float32.
    overflows_in_float16=True,
    find_prediction=lambda _: "v_prediction",
    native_sides={},
    enlarges_image=True,
)

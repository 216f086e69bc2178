"""Stable Diffusion 2.x: OpenCLIP-H up to its penultimate layer, and often v-prediction.

Configurations ask for attention in float32, since its scores overflow in float16; the kernels here
keep them in float32 anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from worker.engine import text
from worker.engine.families import open_clip, sd1
from worker.engine.families.family import Family, TextEncoder

UNET_CONFIG = {
    "sample_size": 64,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
#: The text encoder without the last of its 24 layers, as in diffusers' format.
TEXT_CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}


@torch.no_grad()
def find_prediction(unet: Any) -> str:
    """What a UNet predicts, by AUTOMATIC1111's rule: its answer to grey at the last timestep.

    Of v-prediction it is the image's negative, far below the input. Inpainting checkpoints predict
    epsilon, as there.
    """
    if unet.config.in_channels != unet.config.out_channels:
        return "epsilon"
    grey = torch.full((1, unet.config.in_channels, 8, 8), 0.5)
    context = torch.full((1, 2, unet.config.cross_attention_dim), 0.5)
    # On the CPU and in float32, where float16 may overflow or be missing.
    answer = unet.float()(grey, torch.tensor([999.0]), context).sample
    return "v_prediction" if (answer - grey).mean() < -1 else "epsilon"


SD2 = Family(
    name="Stable Diffusion 2.x",
    slug="sd2",
    unet_config=UNET_CONFIG,
    vae_config=sd1.VAE_CONFIG,
    text_encoders=(
        TextEncoder(
            network="text_encoder",
            config=TEXT_CONFIG,
            prefix="cond_stage_model.model.",
            convert=open_clip.read,
            # AUTOMATIC1111 ignores clip_skip here.
            rules=text.Rules(padding=open_clip.PADDING, layer=1),
        ),
    ),
    find_prediction=find_prediction,
    native_sides={"epsilon": 512, "v_prediction": 768},
)

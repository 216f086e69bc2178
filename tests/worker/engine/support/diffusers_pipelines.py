"""diffusers' pipelines of tiny models, with AUTOMATIC1111's timesteps, and what they draw."""

import inspect
from typing import Any

import numpy as np
import torch
from diffusers import EulerAncestralDiscreteScheduler, EulerDiscreteScheduler

from worker.engine import contract

EULERS: dict[str, Any] = {
    "euler_ancestral": EulerAncestralDiscreteScheduler,
    "euler": EulerDiscreteScheduler,
}


def with_parts_of(
    pipeline: Any, kind: Any, sampler: str = "euler_ancestral", **parts: Any
) -> Any:
    """A pipeline of another kind with the networks of one; *parts* are its own."""
    found = dict(pipeline.components)
    config = found["scheduler"].config
    scheduler = EULERS[sampler].from_config(config, timestep_spacing="linspace")
    option = (
        "add_watermarker" if "text_encoder_2" in found else "requires_safety_checker"
    )
    made = kind(**{**found, "scheduler": scheduler, **parts, option: False})
    made.set_progress_bar_config(disable=True)
    return made


def draw_in_diffusers(
    pipeline: Any, request: contract.ImageRequest, **changes: Any
) -> Any:
    """A request's image, or its latents if *changes* say so."""
    settings = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.steps,
        "guidance_scale": request.cfg_scale,
        "width": request.width,
        "height": request.height,
        "generator": torch.Generator().manual_seed(request.seed),
        "output_type": "np",
        **changes,
    }
    taken = inspect.signature(pipeline.__call__).parameters
    images = pipeline(
        **{name: settings[name] for name in settings if name in taken}
    ).images
    return images if settings["output_type"] == "latent" else levels(images[0])


def levels(image: np.ndarray[Any, Any]) -> contract.Pixels:
    return np.asarray((image * 255).round().astype("uint8"))

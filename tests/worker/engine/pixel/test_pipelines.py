"""Whole images, in float32, against diffusers' own pipelines of DeepFloyd IF."""

from typing import Any

import pytest
import torch
from PIL import Image

from pixel import tiny_cascade
from worker.engine import contract

pytestmark = pytest.mark.slow

PROMPT = "A red house"
NEGATIVE = "blurry"

#: Of values between -1 and 1. Random weights and guidance enlarge the rounding of a call, which is
#: some 1e-5 in float32, a hundred times over an image; `test_unet` compares the calls in float64.
ROUNDING = 2e-3


def draw_base(pipeline: Any, **steps: Any) -> torch.Tensor:
    (image,) = pipeline(
        PROMPT,
        negative_prompt=NEGATIVE,
        guidance_scale=7.0,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
        clean_caption=False,
        **steps,
    ).images
    return image


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"prediction_type": "v_prediction"},
        {"thresholding": False},
        {"thresholding": False, "clip_sample": False},
        {"timestep_spacing": "trailing"},
        {"timestep_spacing": "linspace", "sample_max_value": 1.0},
    ],
    ids=str,
)
def test_a_base_image_is_that_of_diffusers(
    scheduler, make_engine, pipeline, request_of, draw_latents
):
    (image,) = draw_latents(make_engine(**scheduler), request_of())
    expected = draw_base(pipeline("base", **scheduler), num_inference_steps=8)
    assert torch.allclose(image, expected, atol=ROUNDING), (
        (image - expected).abs().max()
    )
    assert image.std() > 0.1


@pytest.mark.parametrize(
    ("noise_level", "strength"), [(250, 0.25), (0, 0.0), (999, 1.0)]
)
def test_a_super_resolution_image_is_that_of_diffusers(
    noise_level: int,
    strength: float,
    make_engine,
    pipeline,
    request_of,
    low_image,
    draw_latents,
):
    engine = make_engine("sr", slots=2)
    owned = pipeline("sr")
    flipped = low_image[::-1]
    requests = [
        request_of("sr", seed=seed, init=contract.InitImage(low, strength))
        for seed, low in ((1, low_image), (2, flipped), (3, low_image))
    ]
    images = draw_latents(engine, *requests)
    for seed, low, image in zip(
        (1, 2, 3), (low_image, flipped, low_image), images, strict=True
    ):
        (expected,) = owned(
            PROMPT,
            negative_prompt=NEGATIVE,
            image=Image.fromarray(low),
            noise_level=noise_level,
            num_inference_steps=8,
            generator=torch.Generator().manual_seed(seed),
            output_type="pt",
            clean_caption=False,
        ).images
        assert expected.shape == (3, tiny_cascade.SR_SIDE, tiny_cascade.SR_SIDE)
        assert torch.allclose(image, expected, atol=ROUNDING), (
            (image - expected).abs().max()
        )

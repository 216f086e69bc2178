"""img2img and inpainting are AUTOMATIC1111's, and diffusers' where both compute the same.

diffusers takes `int(steps * strength)` steps, AUTOMATIC1111 one more, so the tests ask diffusers
for as many. DDIM and PLMS begin one timestep later in AUTOMATIC1111 than the noise that they were
given, and it keeps what is outside a mask in the estimates, not in the noisy latents: there the
reference is `a1111.Reference`.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from PIL import Image

import a1111
from diffusers_pipelines import draw_in_diffusers, with_parts_of
from drawing import ROUNDING, difference, make_request
from imagefleet.validation import JSONDict
from worker.engine import contract
from worker.engine.passes import begin

SAMPLERS = ["euler_ancestral", "euler", "dpmpp_2m", "dpmpp_2m_karras", "ddim", "plms"]

pytestmark = pytest.mark.slow


@pytest.fixture
def request_of(pixels: contract.Pixels) -> Any:
    def make(
        strength: float = 0.6, init: JSONDict | None = None, **changes: Any
    ) -> Any:
        settings = {
            "prompt": "a red circle",
            "negative_prompt": "green, blurry",
            "steps": 8,
        }
        given = {"pixels": pixels, **(init or {})}
        begins = contract.InitImage(denoising_strength=strength, **given)
        return make_request(**{**settings, "seed": 5, "init": begins, **changes})

    return make


@pytest.fixture
def reference(family_pipeline, k_diffusion) -> Any:
    return lambda family: a1111.Reference(family_pipeline(family), k_diffusion)


def expected(
    reference: a1111.Reference, request: Any, mask: a1111.Mask | None = None
) -> np.ndarray[Any, Any]:
    taken = begin.img2img(request.steps, request.init.denoising_strength)
    init = mask.init if mask else reference.encode(request.init.pixels)
    latents = reference.img2img(request, init, **taken._asdict(), mask=mask)
    return reference.decode(latents)


@pytest.mark.parametrize(
    ("family", "sampler"), [("sd1", "euler"), ("sdxl", "euler_ancestral")]
)
def test_images_are_those_of_diffusers_pipeline(
    family: str,
    sampler: str,
    draw_family,
    family_pipeline,
    reference,
    request_of,
):
    xl = StableDiffusionXLImg2ImgPipeline
    kind = xl if family == "sdxl" else StableDiffusionImg2ImgPipeline
    pipeline = with_parts_of(family_pipeline(family), kind, sampler)
    request = request_of(0.6, sampler=sampler)
    # Latents: diffusers would draw those of pixels from the VAE's distribution.
    image = reference(family).encode(request.init.pixels)
    # int(0.6 * 8) is 4, and one more
    theirs = draw_in_diffusers(pipeline, request, image=image, strength=5.01 / 8)
    image = draw_family(family, request)
    assert difference(image, theirs) <= ROUNDING
    assert difference(image, request.init.pixels) > 20, "or the test shows nothing"


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_an_image_of_no_whole_cells_is_encoded_as_it_is_and_drawn_in_whole_ones(
    family: str,
    draw_family,
    reference,
    request_of,
    pixels: contract.Pixels,
):
    """SDXL is told the size as it was asked for."""
    wide = np.asarray(Image.fromarray(pixels).resize((79, 69)))
    request = request_of(init={"pixels": wide}, width=79, height=69)
    image = draw_family(family, request)
    assert image.shape == (64, 72, 3)
    assert difference(image, expected(reference(family), request)) <= ROUNDING


@pytest.mark.parametrize(
    ("family", "sampler", "strength"),
    [
        *product(["sd1"], SAMPLERS, [0.6]),
        *product(["sd1"], ["euler_ancestral", "ddim", "plms"], [0.0, 1.0]),
        ("sdxl", "dpmpp_2m_karras", 0.6),
    ],
)
def test_images_are_automatic1111s_with_every_sampler(
    family: str,
    sampler: str,
    strength: float,
    draw_family,
    reference,
    request_of,
):
    """At the least and the most strength, DDIM and PLMS may have no step to take."""
    request = request_of(strength, sampler=sampler)
    image = draw_family(family, request)
    assert difference(image, expected(reference(family), request)) <= ROUNDING


@pytest.mark.parametrize(
    ("family", "sampler", "content"),
    [
        ("sd1", "euler_ancestral", "original"),
        ("sd1", "euler_ancestral", "fill"),
        ("sd1", "ddim", "latent noise"),
        ("sd1", "dpmpp_2m_karras", "latent nothing"),
        ("sdxl", "dpmpp_2m_karras", "latent noise"),
        ("sdxl", "ddim", "original"),
        ("sdxl", "plms", "fill"),
    ],
)
def test_inpainting_is_automatic1111s(
    family: str,
    sampler: str,
    content: str,
    draw_family,
    reference,
    request_of,
    mask,
):
    given = {"mask": mask, "masked_content": content}
    request = request_of(init=given, sampler=sampler, fill_seed=31)
    own = reference(family)
    image = draw_family(family, request)
    theirs = expected(own, request, own.keep(request.init, 31))
    assert difference(image, theirs) <= ROUNDING
    unmasked = draw_family(family, request_of(sampler=sampler))
    assert difference(image, unmasked) > 20, "or the test shows nothing"


def test_what_is_below_the_mask_is_filled_from_around_it(pixels, mask):
    pixels = pixels.copy()
    pixels[mask < 255] = pixels[mask < 255] // 4 + [180, 0, 0]
    pixels[mask == 255] = [0, 0, 255]
    init = contract.InitImage(pixels, 0.5, mask, "fill")
    filled = begin.prepare_image(init, 8).pixels
    assert (filled[mask == 0] == pixels[mask == 0]).all()
    inside = filled[mask == 255]
    assert inside[:, 0].min() > 120, "red, as what is outside"
    assert inside[:, 2].max() < 100

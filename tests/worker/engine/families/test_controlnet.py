"""Images with ControlNets are those of diffusers' pipelines and networks, in float32."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from diffusers import (
    ControlNetModel,
    MultiControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)
from PIL import Image

from diffusers_pipelines import draw_in_diffusers, with_parts_of
from drawing import ROUNDING, difference, draw, make_request
from families import tiny_controlnets
from worker.engine import contract

#: Steered images that are no more different than this would show nothing.
VISIBLE = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def network(family_folder) -> Any:
    @cache
    def make(family: str, seed: int = 0) -> ControlNetModel:
        return tiny_controlnets.make(family_folder(family), seed)

    return make


@pytest.fixture(scope="session")
def draw_steered(family_pipeline) -> Any:
    def draw(family: str, network: Any, request: Any, **changes: Any) -> Any:
        xl = StableDiffusionXLControlNetPipeline
        kind = xl if family == "sdxl" else StableDiffusionControlNetPipeline
        pipeline = with_parts_of(
            family_pipeline(family), kind, request.sampler, controlnet=network
        )
        images = [Image.fromarray(each.pixels) for each in request.controls]
        scales = [each.weight for each in request.controls]
        if not isinstance(network, MultiControlNetModel):
            (images,) = images
            (scales,) = scales
        return draw_in_diffusers(
            pipeline,
            request,
            image=images,
            controlnet_conditioning_scale=scales,
            **changes,
        )

    return draw


@pytest.fixture
def steered(make_control, family_folder) -> Any:
    return lambda seed, family, **changes: make_control(
        seed, family_folder(family), **changes
    )


def request_of(*controls: contract.Control, **changes: Any) -> contract.ImageRequest:
    words = {"prompt": "a red circle", "negative_prompt": "dull, grey"}
    return make_request(**words, **{"seed": 5, **changes}, controls=controls)


@pytest.mark.parametrize(
    ("family", "sampler", "width"),
    [
        ("sd1", "euler", 64),
        ("sd1", "euler_ancestral", 72),
        ("sdxl", "euler_ancestral", 72),
    ],
)
def test_images_are_those_of_diffusers(
    family: str,
    sampler: str,
    width: int,
    family_engine,
    network,
    steered,
    draw_steered,
):
    """Those whose latents do not halve evenly as well."""

    def made(*controls: contract.Control) -> contract.ImageRequest:
        wider = ((0, 0), (0, width - 64), (0, 0))
        given = [replace(each, pixels=np.pad(each.pixels, wider)) for each in controls]
        return request_of(*given, sampler=sampler, steps=6, width=width)

    request = made(steered(0, family, weight=0.8))
    (image,) = draw(family_engine(family), request)
    theirs = draw_steered(family, network(family), request)
    assert difference(image, theirs) <= ROUNDING
    other = made(steered(0, family, image=1, weight=0.8))
    plain, other_image = draw(family_engine(family), made(), other)
    assert difference(image, plain) > VISIBLE
    assert difference(image, other_image) > VISIBLE


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_several_controlnets_are_those_of_diffusers(
    family: str,
    family_engine,
    network,
    steered,
    draw_steered,
):
    controls = [steered(1, family, weight=0.6), steered(0, family, image=1, weight=0.9)]
    request = request_of(*controls)
    (image,) = draw(family_engine(family), request)
    both = MultiControlNetModel([network(family, 1), network(family, 0)])
    assert difference(image, draw_steered(family, both, request)) <= ROUNDING
    (one,) = draw(family_engine(family), request_of(controls[0]))
    assert difference(image, one) > VISIBLE
    (turned,) = draw(family_engine(family), request_of(*reversed(controls)))
    assert difference(image, turned) <= ROUNDING
    (twice,) = draw(family_engine(family), request_of(controls[0], controls[0]))
    doubled = request_of(steered(1, family, weight=1.2))
    assert difference(twice, draw(family_engine(family), doubled)[0]) <= ROUNDING


def test_a_range_of_steps_is_that_of_diffusers_where_both_count_alike(
    draw_family,
    network,
    steered,
    draw_steered,
):
    """Begun after two finished steps of 8 is begun in the fourth."""
    request = request_of(steered(0, "sd1", start=0.25, end=0.5), steps=8)
    image = draw_family("sd1", request)
    window = {"control_guidance_start": 3 / 8, "control_guidance_end": 6 / 8}
    theirs = draw_steered("sd1", network("sd1"), request, **window)
    assert difference(image, theirs) <= ROUNDING
    whole = draw_steered("sd1", network("sd1"), request)
    assert difference(image, whole) > ROUNDING


def test_shuffle_steers_the_prompt_alone_and_by_means(
    draw_family,
    network,
    make_control,
    family_folder,
    draw_steered,
    tmp_path,
):
    path = tmp_path / "control_v11e_sd15_shuffle.safetensors"
    tiny_controlnets.build(path, family_folder("sd1"))
    request = request_of(make_control(path=path, weight=1.5))
    image = draw_family("sd1", request)
    pooled = tiny_controlnets.make(family_folder("sd1"))
    pooled.register_to_config(global_pool_conditions=True)
    assert difference(image, draw_steered("sd1", pooled, request)) <= ROUNDING
    plain = draw_steered("sd1", network("sd1"), request)
    assert difference(image, plain) > ROUNDING

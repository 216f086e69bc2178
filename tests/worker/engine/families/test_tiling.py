"""Images that tile are those of diffusers' networks with circular padding."""

import copy
from typing import Any

import pytest
from torch import nn

import a1111
from drawing import ROUNDING, difference, draw, make_request
from tests.worker.engine.families.test_hires import first_pass
from worker.engine import contract
from worker.engine.passes import begin

pytestmark = pytest.mark.slow


@pytest.fixture
def reference(family_pipeline, k_diffusion) -> Any:
    def make(family: str) -> a1111.Reference:
        pipeline = copy.deepcopy(family_pipeline(family))
        for network in (pipeline.unet, pipeline.vae):
            for module in network.modules():
                if isinstance(module, nn.Conv2d):
                    module.padding_mode = "circular"
        return a1111.Reference(pipeline, k_diffusion)

    return make


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_images_with_an_image_to_begin_with_are_automatic1111s_in_any_company(
    family: str,
    family_engine,
    reference,
    pixels: contract.Pixels,
):
    """Beside others of their size that do not tile, and that are drawn as alone."""
    init = contract.InitImage(pixels, 0.6)
    engine = family_engine(family)
    (tiled, plain) = (
        make_request(init=init, prompt="a star", steps=6, tiling=each)
        for each in (True, False)
    )
    drawn = draw(engine, tiled, plain, make_request(seed=9, tiling=True))
    theirs = reference(family)
    latents = theirs.img2img(
        tiled, theirs.encode(pixels), **begin.img2img(6, 0.6)._asdict()
    )
    assert difference(drawn[0], theirs.decode(latents)) <= ROUNDING
    assert difference(drawn[1], draw(engine, plain)[0]) <= ROUNDING
    assert difference(drawn[0], drawn[1]) > 20, "or the test shows nothing"


def test_both_passes_of_hires_fix_tile(draw_family, reference):
    hires = contract.HiresPass(96, 96, 0.7, 4, "Latent")
    request = make_request(
        hires=hires, tiling=True, seed=5, prompt="a star", negative_prompt="x"
    )
    image = draw_family("sd1", request)
    theirs = reference("sd1")
    small = first_pass(theirs.pipeline, request)
    larger = a1111.interpolate(small, 96, 96, mode="bilinear")
    latents = theirs.img2img(request, larger, **begin.second_pass(4, 0.7)._asdict())
    assert difference(image, theirs.decode(latents)) <= ROUNDING

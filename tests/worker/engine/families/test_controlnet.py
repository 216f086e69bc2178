"""Images with ControlNets are those of diffusers' pipelines and networks, in float32.

diffusers' DPM++ 2M rounds timesteps, and AUTOMATIC1111's DDIM and PLMS end one earlier: with these,
the reference is `a1111.Reference` on diffusers' UNet and ControlNet.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    MultiControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)
from PIL import Image

import a1111
from diffusers_pipelines import EULERS, draw_in_diffusers, with_parts_of
from drawing import ROUNDING, difference, draw, make_request
from families import tiny_controlnets
from worker.engine import contract
from worker.engine.passes import begin

#: Steered images that are no more different than this would show nothing.
VISIBLE = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(scope="session")
def network(family_folder: Any) -> Any:
    @cache
    def make(family: str, seed: int = 0) -> ControlNetModel:
        return tiny_controlnets.make(family_folder(family), seed)

    return make


@pytest.fixture(scope="session")
def draw_steered(family_pipeline: Any) -> Any:
    def draw(family: str, network: Any, request: Any, **changes: Any) -> Any:
        xl = StableDiffusionXLControlNetPipeline
        kind = xl if family == "sdxl" else StableDiffusionControlNetPipeline
        pipeline = with_parts_of(
            family_pipeline(family), kind, request.sampler, controlnet=network
        )
        images: Any = [Image.fromarray(each.pixels) for each in request.controls]
        scales: Any = [each.weight for each in request.controls]
        if not isinstance(network, MultiControlNetModel):
            (images,), (scales,) = images, scales
        return draw_in_diffusers(
            pipeline,
            request,
            image=images,
            controlnet_conditioning_scale=scales,
            **changes,
        )

    return draw


@pytest.fixture
def steered(make_control: Any, family_folder: Any) -> Any:
    return lambda seed, family, **changes: make_control(
        seed, family_folder(family), **changes
    )


def request_of(*controls: contract.Control, **changes: Any) -> contract.ImageRequest:
    words = {"prompt": "a red circle", "negative_prompt": "dull, grey"}
    return make_request(**words, **{"seed": 5, **changes}, controls=controls)


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("sampler", EULERS)
@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_images_are_those_of_diffusers(
    family: str,
    sampler: str,
    width: int,
    family_engine: Any,
    network: Any,
    steered: Any,
    draw_steered: Any,
) -> None:
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
    family_engine: Any,
    network: Any,
    steered: Any,
    draw_steered: Any,
) -> None:
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
    family_engine: Any,
    network: Any,
    steered: Any,
    draw_steered: Any,
) -> None:
    """Begun after two finished steps of 8 is begun in the fourth."""
    request = request_of(steered(0, "sd1", start=0.25, end=0.5), steps=8)
    (image,) = draw(family_engine("sd1"), request)
    window = {"control_guidance_start": 3 / 8, "control_guidance_end": 6 / 8}
    theirs = draw_steered("sd1", network("sd1"), request, **window)
    assert difference(image, theirs) <= ROUNDING
    whole = draw_steered("sd1", network("sd1"), request)
    assert difference(image, whole) > ROUNDING


def test_shuffle_steers_the_prompt_alone_and_by_means(
    family_engine: Any,
    network: Any,
    make_control: Any,
    family_folder: Any,
    draw_steered: Any,
    tmp_path: Any,
) -> None:
    path = tmp_path / "control_v11e_sd15_shuffle.safetensors"
    tiny_controlnets.build(path, family_folder("sd1"))
    request = request_of(make_control(path=path, weight=1.5))
    (image,) = draw(family_engine("sd1"), request)
    pooled = tiny_controlnets.make(family_folder("sd1"))
    pooled.register_to_config(global_pool_conditions=True)
    assert difference(image, draw_steered("sd1", pooled, request)) <= ROUNDING
    plain = draw_steered("sd1", network("sd1"), request)
    assert difference(image, plain) > ROUNDING


class SteeredUnet:
    """diffusers' UNet and ControlNet; steered at the calls in which AUTOMATIC1111 would."""

    def __init__(
        self,
        unet: Any,
        network: Any,
        request: contract.ImageRequest,
        taken: begin.Steps,
    ) -> None:
        self._unet, self._network, self._request, self._taken = (
            unet,
            network,
            request,
            taken,
        )
        self.timesteps: list[float] = []

    def __call__(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        vectors: torch.Tensor,
        **extra: Any,
    ) -> Any:
        (control,) = self._request.controls
        self.timesteps.append(float(timestep[0]))
        calls = len(self.timesteps)
        # PLMS' second call belongs to its first step; the callback comes after a step.
        step = calls - 1 - (self._request.sampler == "plms" and calls > 1)
        share = max(0, step - 1) / (self._taken.t_enc + 1)
        weight = control.weight if control.start <= share <= control.end else 0.0
        hint = (
            torch.from_numpy(control.pixels.copy()).permute(2, 0, 1)[None].float() / 255
        )
        down, middle = self._network(
            x,
            timestep,
            vectors,
            hint.expand(2, -1, -1, -1),
            weight,
            return_dict=False,
            **extra,
        )
        return self._unet(
            x,
            timestep,
            vectors,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            **extra,
        )


class SteeredPipeline:
    def __init__(self, pipeline: Any, unet: SteeredUnet) -> None:
        self._pipeline, self.unet = pipeline, unet
        if hasattr(pipeline, "text_encoder_2"):
            self.text_encoder_2 = pipeline.text_encoder_2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


@pytest.mark.parametrize(
    "sampler", ["euler_ancestral", "dpmpp_2m", "dpmpp_2m_karras", "ddim", "plms"]
)
@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_img2img_is_steered_in_the_steps_that_automatic1111_counts(
    family: str,
    sampler: str,
    family_engine: Any,
    family_pipeline: Any,
    network: Any,
    steered: Any,
    k_diffusion: Any,
) -> None:
    init = contract.InitImage(steered(0, family, image=7).pixels, 0.8)
    control = steered(0, family, weight=0.8, start=0.2, end=0.6)
    request = request_of(control, sampler=sampler, steps=8, init=init)
    (image,) = draw(family_engine(family), request)
    taken = begin.img2img(8, 0.8)
    pipeline = family_pipeline(family)
    unet = SteeredUnet(pipeline.unet, network(family), request, taken)
    reference = a1111.Reference(SteeredPipeline(pipeline, unet), k_diffusion)
    latents = reference.img2img(
        request, reference.encode(init.pixels), **taken._asdict()
    )
    assert difference(image, reference.decode(latents)) <= ROUNDING
    for other in ({}, {"start": 0.2, "end": 0.3}, {"end": 0.6}):
        widened = request_of(
            steered(0, family, weight=0.8, **other), sampler=sampler, steps=8, init=init
        )
        assert difference(image, draw(family_engine(family), widened)[0]) > ROUNDING

"""Hires fix is AUTOMATIC1111's: two of diffusers' pipelines and what is between them.

AUTOMATIC1111 lengthens the second schedule so that `hr_second_pass_steps` are taken at any
strength: `steps / strength`, of which the last `steps`.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionXLImg2ImgPipeline

import a1111
import tiny_model
from diffusers_pipelines import draw_in_diffusers, with_parts_of
from drawing import ROUNDING, difference, make_request
from imagefleet.job.prompt import read_prompt
from imagefleet.validation import JSONDict
from worker.engine import contract
from worker.engine.passes import begin, upscaling

HIRES = contract.HiresPass(
    width=128, height=128, denoising_strength=0.7, steps=5, upscaler="Latent"
)

#: The steps of that pass.
TAKEN = begin.second_pass(5, 0.7)._asdict()

pytestmark = pytest.mark.slow


def request_of(hires: JSONDict | None = None, **changes: Any) -> Any:
    words = {"prompt": "a red circle", "negative_prompt": "green, blurry"}
    second = dataclasses.replace(HIRES, **(hires or {}))
    return make_request(**words, **{"seed": 5, "hires": second, **changes})


def first_pass(pipeline: Any, request: Any) -> torch.Tensor:
    """Latents [1, 4, height, width]."""
    return draw_in_diffusers(pipeline, request, output_type="latent")


@pytest.mark.parametrize(
    ("family", "upscaler", "how"),
    [
        ("sdxl", "Latent", {"mode": "bilinear"}),
        ("sd1", "Latent (antialiased)", {"mode": "bilinear", "antialias": True}),
        ("sd1", "Latent (bicubic)", {"mode": "bicubic"}),
        ("sd1", "Latent (bicubic antialiased)", {"mode": "bicubic", "antialias": True}),
        ("sd1", "Latent (nearest)", {"mode": "nearest"}),
        ("sd1", "Latent (nearest-exact)", {"mode": "nearest-exact"}),
    ],
)
def test_latent_upscalers_are_two_of_diffusers_pipelines(
    family: str,
    upscaler: str,
    how: JSONDict,
    draw_family,
    family_pipeline,
):
    request = request_of({"upscaler": upscaler, "width": 96, "height": 96})
    pipeline = family_pipeline(family)
    upscaled = a1111.interpolate(first_pass(pipeline, request), 96, 96, **how)
    xl = StableDiffusionXLImg2ImgPipeline
    kind = xl if family == "sdxl" else StableDiffusionImg2ImgPipeline
    assert begin.second_pass(5, 0.7) == (7, 4)
    second = with_parts_of(pipeline, kind)
    larger = dataclasses.replace(request, steps=7, width=96, height=96)
    theirs = draw_in_diffusers(second, larger, image=upscaled, strength=5.01 / 7)
    image = draw_family(family, request)
    assert image.shape == (96, 96, 3)
    assert difference(image, theirs) <= ROUNDING


@pytest.mark.parametrize("sampler", ["dpmpp_2m_karras", "plms"])
def test_the_second_pass_may_have_another_sampler_prompt_and_guidance(
    sampler: str,
    draw_family,
    family_pipeline,
    k_diffusion,
):
    changed = {
        "sampler": sampler,
        "prompt": read_prompt("a blue cat:2"),
        "negative_prompt": "",
    }
    request = request_of(changed)
    pipeline = family_pipeline("sd1")
    reference = a1111.Reference(pipeline, k_diffusion)
    begins = a1111.interpolate(first_pass(pipeline, request), 128, 128, mode="bilinear")
    changed |= {"prompt": "a blue cat", "cfg_scale": 2 * request.cfg_scale}
    second = dataclasses.replace(request, width=128, height=128, **changed)
    theirs = reference.decode(reference.img2img(second, begins, **TAKEN))
    image = draw_family("sd1", request)
    assert difference(image, theirs) <= ROUNDING


@pytest.mark.parametrize(
    ("family", "width", "height", "size"),
    [
        ("sd1", 128, 64, (128, 128)),
        ("sd1", 96, 96, (103, 97)),
        ("sdxl", 96, 128, (128, 128)),
        ("sdxl", 88, 56, (88, 88)),
        ("sdxl", 88, 96, (102, 101)),
    ],
)
def test_a_target_of_another_shape_is_cut_out_of_the_middle(
    family: str,
    width: int,
    height: int,
    size: tuple[int, int],
    draw_family,
    family_pipeline,
    k_diffusion,
):
    """SDXL is told the size before that, which need not have whole cells of the latent."""
    request = request_of({"width": width, "height": height, "whole": size})
    pipeline = family_pipeline(family)
    reference = a1111.Reference(pipeline, k_diffusion)
    begins = a1111.interpolate(first_pass(pipeline, request), *size, mode="bilinear")
    columns = (size[0] - width) // 8
    rows = (size[1] - height) // 8
    begins = begins[
        :,
        :,
        rows // 2 : begins.shape[2] - (rows + 1) // 2,
        columns // 2 : begins.shape[3] - (columns + 1) // 2,
    ]
    second = dataclasses.replace(request, width=width, height=height)
    latents = reference.img2img(second, begins, **TAKEN, told=size)
    image = draw_family(family, request)
    assert image.shape == (height, width, 3)
    assert difference(image, reference.decode(latents)) <= ROUNDING


@pytest.mark.parametrize(
    ("family", "upscaler", "whole"),
    [("sdxl", "Lanczos", (135, 130)), ("sd1", "Nearest", (128, 128))],
)
def test_other_upscalers_take_the_decoded_image(
    family: str,
    upscaler: str,
    whole: tuple[int, int],
    draw_family,
    family_pipeline,
    k_diffusion,
):
    """Enlarged as in `passes/test_upscaling`; one of no whole cells is encoded as it is."""
    request = request_of({"upscaler": upscaler, "whole": whole})
    pipeline = family_pipeline(family)
    reference = a1111.Reference(pipeline, k_diffusion)
    small = reference.decode(first_pass(pipeline, request), rounds=False)
    large = upscaling.find(request.hires, lambda path: None).enlarge_pixels(small)
    second = dataclasses.replace(request, width=128, height=128)
    latents = reference.img2img(second, reference.encode(large), **TAKEN, told=whole)
    image = draw_family(family, request)
    assert difference(image, reference.decode(latents)) <= ROUNDING
    other = draw_family(family, request_of())
    assert difference(image, other) > 20, "or the test shows nothing"


def test_the_second_pass_is_drawn_with_the_loras_of_its_own_prompt_alone(
    family_folder,
    draw_family,
    family_pipeline,
    k_diffusion,
    tmp_path,
):
    """On its text states as well."""
    paths = [
        tiny_model.build_tiny_lora(
            tmp_path / f"{seed}.safetensors", family_folder("sd1"), seed=seed
        )
        for seed in (1, 2)
    ]
    first, second = (contract.Lora(path.stem, path, 1.0, 1.0) for path in paths)
    request = request_of({"loras": (second,)}, loras=(first,))
    pipeline = copy.deepcopy(family_pipeline("sd1"))
    reference = a1111.Reference(pipeline, k_diffusion)
    pipeline.load_lora_weights(tmp_path, weight_name=first.path.name)
    begins = a1111.interpolate(first_pass(pipeline, request), 128, 128, mode="bilinear")
    pipeline.unload_lora_weights()
    pipeline.load_lora_weights(tmp_path, weight_name=second.path.name)
    larger = dataclasses.replace(request, width=128, height=128)
    latents = reference.img2img(larger, begins, **TAKEN)
    image = draw_family("sd1", request)
    assert difference(image, reference.decode(latents)) <= ROUNDING

"""The x4 upscaler: images are those of diffusers' `StableDiffusionUpscalePipeline`.

A tiny one with all that its UNet has beside others: seven inputs, the level of the noise on the
image, and transformers that attend to the prompt alone.
"""

import dataclasses
import json
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionUpscalePipeline,
    UNet2DConditionModel,
)
from PIL import Image
from transformers import CLIPTokenizer

import a1111
import tiny_model
from diffusers_pipelines import EULERS, draw_in_diffusers, levels
from drawing import ROUNDING, assert_alike, difference, draw, draw_alone, make_request
from families import tiny_families
from imagefleet import errors
from imagefleet.job import clip
from packages import TracedPackages
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, load
from worker.engine.slots import engine as slots

#: Images that are no more different than this would show nothing.
VISIBLE = 20

#: In place of four.
TWO_LEVELS = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "only_cross_attention": (True, False),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return tiny_families.build_upscaler(
        tmp_path_factory.mktemp("upscaler") / "x4", **TWO_LEVELS
    )


@pytest.fixture(scope="session")
def engine(folder: Path) -> slots.SlotEngine:
    """Shared by tests that leave it unchanged."""
    return load.load_engine(load.EngineSettings(folder, "cpu", slots=3))


@pytest.fixture
def make_engine(folder: Path, make_slot_engine) -> Any:
    return partial(make_slot_engine, model=folder)


@pytest.fixture(scope="session")
def lora(folder: Path, tmp_path_factory) -> contract.Lora:
    path = tmp_path_factory.mktemp("loras") / "style.safetensors"
    return contract.Lora("style", tiny_model.build_tiny_lora(path, folder), 1.0, 1.0)


@pytest.fixture(scope="session")
def pipeline(folder: Path) -> Any:
    def build(scheduler: Any) -> Any:
        made = StableDiffusionUpscalePipeline.from_pretrained(
            folder,
            scheduler=scheduler,
            tokenizer=CLIPTokenizer.from_pretrained(clip.TOKENIZER, pad_token="!"),
        )
        made.set_progress_bar_config(disable=True)
        a1111.resize_last(made.unet)
        return made

    return build


@pytest.fixture(scope="session")
def eulers(folder: Path, pipeline) -> Any:
    def build(sampler: str) -> Any:
        spaced = {"timestep_spacing": "linspace"}
        return pipeline(EULERS[sampler].from_pretrained(folder / "scheduler", **spaced))

    return cache(build)


def image_of(width: int, height: int, seed: int = 3) -> contract.Pixels:
    """Large smooth shapes of several colours."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    )


def request_of(width: int = 16, height: int = 16, **changes: Any) -> Any:
    settings = {
        "prompt": "a red circle",
        "negative_prompt": "green, blurry",
        "init": contract.InitImage(image_of(width, height), 0.1),
    }
    settings |= {"steps": 6, "seed": 5, "width": 4 * width, "height": 4 * height}
    return make_request(**{**settings, **changes})


def draw_upscaled(pipeline: Any, request: Any, level: int = 100, **changes: Any) -> Any:
    image = Image.fromarray(request.init.pixels)
    return draw_in_diffusers(
        pipeline, request, image=image, noise_level=level, **changes
    )


@pytest.mark.parametrize(
    ("sampler", "size"),
    [
        ("euler", (16, 16)),
        ("euler_ancestral", (24, 16)),
        ("euler_ancestral", (20, 28)),
    ],
)
def test_images_are_those_of_diffusers(
    sampler: str,
    size: tuple[int, int],
    engine,
    eulers,
):
    """Of sides that the UNet's blocks cannot halve three times as well."""
    request = request_of(*size, sampler=sampler)
    image, other = draw(engine, request, dataclasses.replace(request, prompt="a boat"))
    assert image.shape == (4 * size[1], 4 * size[0], 3)
    assert difference(image, draw_upscaled(eulers(sampler), request)) <= ROUNDING
    assert image.std() > VISIBLE, "not a uniform image"
    assert difference(image, other) > VISIBLE, "or the test shows nothing"


def test_ddim_is_diffusers_up_to_the_timestep_that_automatic1111_leaves_out(
    engine,
    folder: Path,
    pipeline,
):
    request = request_of(sampler="ddim", steps=8)
    made = pipeline(DDIMScheduler.from_pretrained(folder / "scheduler"))
    seen = []
    draw_upscaled(made, request, callback=lambda *given: seen.append(given[2].clone()))
    with torch.no_grad():
        decoded = made.vae.decode(seen[-2] / made.vae.config.scaling_factor).sample
    theirs = levels(made.image_processor.postprocess(decoded, output_type="np")[0])
    (image,) = draw(engine, request)
    assert difference(image, theirs) <= ROUNDING


@pytest.mark.parametrize("level", [0, 20, 350])
def test_the_noise_has_the_level_that_the_unet_is_told(level: int, engine, eulers):
    init = contract.InitImage(image_of(16, 16), level / 1000)
    image, usual = draw(engine, request_of(init=init), request_of())
    theirs = draw_upscaled(eulers("euler_ancestral"), request_of(), level)
    assert difference(image, theirs) <= ROUNDING
    assert difference(image, usual) > ROUNDING, "or the test shows nothing"


def test_a_lora_changes_the_image_as_in_diffusers(
    engine,
    eulers,
    lora: contract.Lora,
):
    """Those of the layers that attend to the prompt in the place of the image as well."""
    request = request_of(loras=(lora,))
    made = eulers.__wrapped__("euler_ancestral")  # not the one that other tests share
    made.load_lora_weights(lora.path.parent, weight_name=lora.path.name)
    theirs = draw_upscaled(made, request)
    image, plain = draw(engine, request, request_of())
    assert difference(image, theirs) <= ROUNDING
    assert difference(image, plain) > VISIBLE


@pytest.fixture(scope="session")
def mixed(lora: contract.Lora) -> list[dict[str, Any]]:
    """Of several levels, images, sizes, lengths of prompts and samplers, with and without LoRA."""
    init = contract.InitImage(image_of(16, 16, 8), 0.35)
    return [
        {},
        {"seed": 6, "init": init, "loras": (lora,)},
        {"seed": 7, "prompt": "a (red:1.3) star, " * 20, "sampler": "dpmpp_2m_karras"},
        {"width": 64, "height": 80, "init": contract.InitImage(image_of(16, 20), 0.02)},
        {"seed": 8, "steps": 3, "cfg_scale": 2.0, "negative_prompt": ""},
    ]


@pytest.mark.parametrize("weights", ["merged", "reloaded"])
def test_images_are_the_same_in_company_and_alone(
    weights: str,
    make_engine,
    mixed: list[dict[str, Any]],
):
    requests = [dataclasses.replace(request_of(), **each) for each in mixed]
    alone = draw_alone(make_engine(slots=1, slot_weights=weights), requests)
    assert_alike(draw(make_engine(slot_weights=weights), *requests), alone)


def test_compiled_ticks_read_what_is_written_into_the_slots_later(
    folder: Path, tmp_path, make_engine
):
    """With one block of each kind, which take seconds to trace."""
    small = shutil.copytree(folder, tmp_path / "small")
    for part, network, blocks in (
        (
            "unet",
            UNet2DConditionModel,
            {
                "block_out_channels": (32, 32),
                "layers_per_block": 0,
            },
        ),
        (
            "vae",
            AutoencoderKL,
            {
                "block_out_channels": (16,) * 3,
                "layers_per_block": 0,
            },
        ),
    ):
        config = {**network.load_config(small / part), **blocks}
        shutil.rmtree(small / part)
        network.from_config(config).save_pretrained(small / part)
    make_engine = partial(make_engine, model=small)
    other = contract.InitImage(image_of(16, 16, 8), 0.35)
    requests = [request_of(), request_of(init=other), request_of(seed=6)]
    plain = make_engine(slots=2)
    compiled = make_engine(
        slots=2, packages=TracedPackages(), compiled_modes=("shared",)
    )
    compiled.warm_up(requests[0])
    assert_alike(draw(compiled, *requests), draw(plain, *requests))


MASK = np.zeros((16, 16), np.uint8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"init": None}, "enlarges an image: the job needs init_images"),
        (
            {"init": contract.InitImage(image_of(16, 16), 0.1, MASK)},
            "does not support a mask",
        ),
        (
            {"hires": contract.HiresPass(128, 128, 0.5, 2, "Latent")},
            r"does not support a second pass \(hires fix\)",
        ),
        (
            {"controls": (contract.Control("net", Path("net"), image_of(64, 64)),)},
            "does not support ControlNets",
        ),
        (
            {"init": contract.InitImage(image_of(16, 24), 0.1)},
            "makes 4 times the sides of .* it has 16x24 .* asks for 64x64",
        ),
        (
            {"init": contract.InitImage(image_of(18, 16), 0.1)},
            "multiples of 4 from 16 to 512; it has 18x16",
        ),
        ({"init": contract.InitImage(image_of(516, 16), 0.1)}, "it has 516x16"),
        ({"init": contract.InitImage(image_of(12, 16), 0.1)}, "it has 12x16"),
        (
            {"init": contract.InitImage(image_of(16, 16), 0.75)},
            "denoising_strength is 0.75, a noise of level 750 .* up to 350, .* of 0.35",
        ),
    ],
)
def test_a_request_that_cannot_be_drawn_is_refused_with_what_to_do(
    changes: dict[str, Any], sentence: str, engine
):
    with pytest.raises(errors.JobError, match=sentence):
        engine.prepare(request_of(**changes))


def test_its_nodes_are_not_checked_by_images_that_may_all_be_alike(engine):
    assert engine.self_check is None
    assert engine.family == "x4_upscaler"


@pytest.fixture
def changed(folder: Path, tmp_path) -> Any:
    """A copy of the checkpoint with another configuration of a part."""

    def change(part: str, **values: Any) -> Path:
        shutil.copytree(folder, tmp_path / "changed")
        path = tmp_path / "changed" / part
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        return tmp_path / "changed"

    return change


def test_the_highest_level_is_the_checkpoints_own(changed, make_engine):
    made = make_engine(model=changed("model_index.json", max_noise_level=99))
    with pytest.raises(errors.JobError, match="levels up to 99"):
        made.prepare(request_of())


def test_no_level_is_beyond_those_that_the_unet_knows(changed):
    folder = changed("model_index.json", max_noise_level=5000)
    loaded = checkpoints.load_checkpoint(folder, torch.device("cpu"), torch.float32)
    assert loaded.image_noise.max_level == 999

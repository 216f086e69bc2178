"""UNet output and whole images of each family are those of diffusers."""

import shutil
from functools import partial

import pytest
import torch
from diffusers import UNet2DConditionModel

import a1111
from diffusers_pipelines import draw_in_diffusers
from drawing import ROUNDING, difference, draw, make_request
from imagefleet import errors
from imagefleet.job import differences
from imagefleet.job.prompt import read_prompt
from imagefleet.job.samplers import Options
from worker.engine import load
from worker.engine.families.table import SDXL
from worker.engine.lora.merge import NO_CHANGES
from worker.engine.networks.transformer import Call
from worker.engine.networks.unet import SlotUnet

FAMILIES = ["sd1", "sd2", "sdxl"]


WORDS = "a red circle above a blue square"
OTHERS = "green, blurry"

pytestmark = pytest.mark.slow


request_of = partial(make_request, prompt=WORDS, negative_prompt=OTHERS, seed=5)


@pytest.mark.parametrize("cfg_scale", [7.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_those_of_diffusers(
    family: str,
    cfg_scale: float,
    draw_family,
    family_pipeline,
):
    """Those without guidance as well, of which it draws one row, too."""
    request = request_of(cfg_scale=cfg_scale)
    image = draw_family(family, request)
    pipeline = family_pipeline(family)
    assert difference(image, draw_in_diffusers(pipeline, request)) <= ROUNDING
    assert image.std() > 20, "not a uniform image"
    other = draw_family(family, request_of(prompt="a boat"))
    assert difference(image, other) > 20, "or the test shows nothing"


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_an_lcm_models_image_depends_on_the_guidance_that_it_embeds(
    family: str,
    family_folder,
    family_pipeline,
    tmp_path,
):
    """And never takes a row for the negative prompt."""
    folder = shutil.copytree(family_folder(family), tmp_path / "lcm")
    config = UNet2DConditionModel.load_config(folder / "unet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel.from_config(
            {**config, "time_cond_proj_dim": 32}
        ).eval()
    unet.save_pretrained(folder / "unet")
    pipeline = family_pipeline(family)
    pipeline = type(pipeline)(**{**pipeline.components, "unet": unet})
    engine = load.load_engine(load.EngineSettings(folder, "cpu", slots=2))
    images = []
    for scale in (1.0, 3.0, 7.0):
        request = request_of(
            cfg_scale=scale, sampler_options=Options(s_min_uncond=1000.0)
        )
        images += draw(engine, request)
        assert difference(images[-1], draw_in_diffusers(pipeline, request)) <= ROUNDING
    assert engine.unet_rows == 3 * request.steps
    assert (
        difference(images[0], images[1]) > ROUNDING < difference(images[1], images[2])
    )
    with pytest.raises(errors.JobError, match="does not draw AND"):
        engine.prepare(request_of(prompt=read_prompt("a cat AND a dog")))


@pytest.mark.parametrize("width", [64, 96])
def test_sdxls_image_depends_on_the_size_that_the_unet_is_told(
    draw_family,
    family_pipeline,
    width: int,
):
    request = request_of(width=width)
    image = draw_family("sdxl", request)
    pipeline = family_pipeline("sdxl")
    assert difference(image, draw_in_diffusers(pipeline, request)) <= ROUNDING
    told = draw_in_diffusers(pipeline, request, original_size=(512, 512))
    assert difference(image, told) > ROUNDING, "or the test shows nothing"


def test_sdxls_empty_negative_prompt_is_zeros_as_in_automatic1111(
    draw_family,
    family_pipeline,
):
    """In diffusers only a missing one is."""
    request = request_of(negative_prompt="")
    image = draw_family("sdxl", request)
    pipeline = family_pipeline("sdxl")
    zeros = draw_in_diffusers(pipeline, request, negative_prompt=None)
    assert difference(image, zeros) <= ROUNDING
    assert difference(image, draw_in_diffusers(pipeline, request)) > ROUNDING
    blank = draw_family("sdxl", request_of(negative_prompt=" "))
    assert difference(blank, image) > ROUNDING, "a space is not an empty prompt there"


@pytest.mark.parametrize(
    ("sides", "tiles"), [((8, 8), False), ((9, 12), True), ((7, 11), False)]
)
@torch.no_grad()
def test_unet_output_is_diffusers(
    family_checkpoint, sides: tuple[int, int], tiles: bool
):
    """With AUTOMATIC1111's sizes where latents do not halve evenly; images that tile as well."""
    for family in FAMILIES:
        checkpoint = family_checkpoint(family)
        a1111.resize_last(checkpoint.unet)
        original = checkpoint.unet
        width = checkpoint.unet.config.cross_attention_dim
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((3, 4, *sides), generator=generator)
        vectors = torch.randn((6, 154, width), generator=generator)
        times = torch.tensor([999.0, 401.5, 1.0])
        added = None
        extra = {}
        if family == "sdxl":
            pooled = torch.randn((6, 48), generator=generator)
            sizes = torch.stack(
                [SDXL.size_ids(64, 96)] * 2 + [SDXL.size_ids(80, 64)] * 4
            )
            extra["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": sizes}
        rows = x.repeat_interleave(2, dim=0)
        for module in original.modules():
            if isinstance(module, torch.nn.Conv2d) and tiles:
                module.padding_mode = "circular"
        expected = original(rows, times.repeat_interleave(2), vectors, **extra).sample
        for module in original.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.padding_mode = "zeros"
        unet = SlotUnet(original)
        if family == "sdxl":
            added = unet.added(pooled, sizes)
        unet.resize(3)
        for slot in range(3):
            unet.load_slot(slot, NO_CHANGES)
        context = torch.cat(
            [unet.prompt_layers.compute(each, {}) for each in vectors.split(2)]
        )
        for per_slot in (False, True):
            output = unet(
                x, times, Call(context, per_slot=per_slot, tiles=tiles), added
            )
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["sd2", "sdxl"])
def test_clip_skip_changes_nothing_where_automatic1111_ignores_it(
    family: str, family_engine
):
    engine = family_engine(family)
    plain, skipped = draw(engine, request_of(), request_of(clip_skip=12))
    # A prompt that was encoded in other company may be rounded in another way.
    assert difference(plain, skipped) <= ROUNDING


def test_lcm_on_a_checkpoint_of_velocities_is_said(family_engine, caplog):
    differences.warn.cache_clear()
    engine = family_engine("sd2")
    engine.prepare(make_request(sampler="euler"))
    assert not caplog.records
    engine.prepare(make_request(sampler="lcm"))
    assert differences.KNOWN["lcm_of_velocities"] in caplog.text

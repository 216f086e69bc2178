"""Checkpoints made for inpainting, whose UNets see a mask and a masked image beside the latents.

Where both compute the same, images are those of diffusers' own pipelines for them. AUTOMATIC1111,
and so the engine, differs from these with a part of the latents outside the mask: it keeps the
original there in every step, as with ordinary checkpoints, and diffusers only tells the UNet. Its
latents of images are drawn from the VAE's distribution, as diffusers' are; here all are its mean.
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
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    UNet2DConditionModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from safetensors.torch import save_file

import a1111
import key_names
from diffusers_pipelines import draw_in_diffusers, with_parts_of
from drawing import ROUNDING, assert_alike, difference, draw, draw_alone, make_request
from families import tiny_controlnets, tiny_families
from imagefleet import errors
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, load
from worker.engine.families import reading
from worker.engine.families.table import SD1, find_prediction
from worker.engine.passes import begin

#: Images that are no more different than this would show nothing.
VISIBLE = 20

SIZE = 64

DRAWN = [
    ("sd1", "euler"),
    ("sd2", "euler_ancestral"),
    ("sdxl", "euler_ancestral"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folder(family_folder, tmp_path_factory) -> Any:
    def build(family: str) -> Path:
        path = tmp_path_factory.mktemp("inpainting") / family
        return tiny_families.build_inpainting(path, family_folder(family))

    return cache(build)


@pytest.fixture(scope="session")
def engine(folder) -> Any:
    """Shared by tests that leave it unchanged."""
    return cache(
        lambda family: load.load_engine(
            load.EngineSettings(folder(family), "cpu", slots=3)
        )
    )


@pytest.fixture(scope="session")
def pipeline(folder, family_pipeline) -> Any:
    """Diffusers' pipeline for such checkpoints, in float32."""

    def build(family: str, sampler: str = "euler_ancestral") -> Any:
        xl = StableDiffusionXLInpaintPipeline
        kind = xl if family == "sdxl" else StableDiffusionInpaintPipeline
        known = family_pipeline(family)
        unet = type(known.unet).from_pretrained(folder(family) / "unet")
        made = with_parts_of(known, kind, sampler, unet=unet)
        a1111.resize_last(made.unet)
        return made

    return cache(build)


@pytest.fixture
def encodes_means(monkeypatch) -> None:
    """Latents are not drawn from the VAE's distribution, as diffusers would have it."""
    mean = lambda self, generator=None: self.mode()  # noqa: E731
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", mean)


request_of = partial(
    make_request,
    prompt="a red circle",
    negative_prompt="green, blurry",
    steps=8,
    seed=7,
)


@pytest.mark.parametrize(("family", "sampler"), DRAWN)
def test_txt2img_is_diffusers_with_all_of_an_image_below_the_mask(
    family: str,
    sampler: str,
    engine,
    pixels,
    pipeline,
    encodes_means: None,
):
    request = request_of(sampler=sampler, width=72)
    wide = np.asarray(Image.fromarray(pixels).resize((72, SIZE)))
    theirs = draw_in_diffusers(
        pipeline(family, sampler),
        request,
        image=Image.fromarray(wide),
        mask_image=Image.new("L", (72, SIZE), 255),
        strength=1.0,
    )
    (image,) = draw(engine(family), request)
    assert difference(image, theirs) <= ROUNDING


@pytest.mark.parametrize(("family", "sampler"), DRAWN)
def test_what_the_unet_sees_of_an_image_is_what_diffusers_shows_it(
    family: str,
    sampler: str,
    engine,
    pixels,
    pipeline,
    encodes_means: None,
):
    """With a mask that has holes: the UNet sees through them, and no whole latent is kept."""
    holes = np.full((SIZE, SIZE), 255, np.uint8)
    for row in range(5):
        for column in range(5):
            holes[row::16, column::8] = 0
    init = contract.InitImage(pixels, 0.6, holes)
    assert begin.prepare_image(init, 8).kept.max() == 0
    request = request_of(init=init, sampler=sampler)
    # diffusers takes int(steps * strength) steps: int(0.6 * 8) is 4, and AUTOMATIC1111 one more
    theirs = draw_in_diffusers(
        pipeline(family, sampler),
        request,
        image=Image.fromarray(pixels),
        mask_image=Image.fromarray(holes),
        strength=5.01 / 8,
    )
    (image,) = draw(engine(family), request)
    assert difference(image, theirs) <= ROUNDING
    (unseen,) = draw(
        engine(family),
        request_of(init=contract.InitImage(pixels, 0.6), sampler=sampler),
    )
    assert difference(image, unseen) > VISIBLE


@pytest.mark.parametrize(
    ("family", "sampler", "content"),
    [
        ("sd1", "euler_ancestral", "original"),
        ("sd1", "dpmpp_2m_karras", "fill"),
        ("sd1", "plms", "latent noise"),
        ("sdxl", "euler_ancestral", "fill"),
        ("sdxl", "ddim", "original"),
    ],
)
def test_inpainting_is_automatic1111s(
    family: str,
    sampler: str,
    content: str,
    engine,
    pipeline,
    k_diffusion,
    pixels,
    mask,
):
    init = contract.InitImage(pixels, 0.6, mask, content)
    request = request_of(init=init, sampler=sampler)
    begins = begin.prepare_image(init, 8).pixels
    own = a1111.Reference(pipeline(family), k_diffusion)
    own = dataclasses.replace(
        own, conditioning=own.inpainting_image_conditioning(begins, mask)
    )
    taken = begin.img2img(request.steps, 0.6)
    kept = own.keep(init, request.seed)
    latents = own.img2img(request, kept.init, **taken._asdict(), mask=kept)
    theirs = own.decode(latents)
    (image,) = draw(engine(family), request)
    assert difference(image, theirs) <= ROUNDING


@pytest.mark.parametrize("sampler", ["euler", "ddim"])
def test_img2img_without_a_mask_shows_the_unet_nothing_of_the_image(
    sampler: str,
    engine,
    pipeline,
    k_diffusion,
    pixels,
):
    """As in AUTOMATIC1111, where it begins with the image's latents all the same."""
    own = a1111.Reference(pipeline("sd1"), k_diffusion)
    conditioning = own.inpainting_image_conditioning(pixels, None)
    # Of an image of one colour, group norms enlarge what float32 rounds.
    grey = own.txt2img_image_conditioning(SIZE, SIZE)
    torch.testing.assert_close(conditioning, grey, atol=0.01, rtol=0)
    own = dataclasses.replace(own, conditioning=conditioning)
    request = request_of(init=contract.InitImage(pixels, 0.6), sampler=sampler)
    taken = begin.img2img(request.steps, 0.6)
    latents = own.img2img(request, own.encode(pixels), **taken._asdict())
    (image,) = draw(engine("sd1"), request)
    assert difference(image, own.decode(latents)) <= ROUNDING


def test_a_second_pass_has_the_conditioning_of_its_own_size(
    engine,
    encodes_means: None,
    pipeline,
    k_diffusion,
):
    """AUTOMATIC1111's has the first pass' after a latent upscaler, which its UNet cannot take."""
    hires = contract.HiresPass(
        96, 96, denoising_strength=0.7, steps=5, upscaler="Latent"
    )
    request = request_of(hires=hires)
    made = pipeline("sd1")
    all_drawn = Image.new("L", (SIZE, SIZE), 255)
    first = draw_in_diffusers(
        made,
        request,
        image=all_drawn.convert("RGB"),
        mask_image=all_drawn,
        strength=1.0,
        output_type="latent",
    )
    own = a1111.Reference(made, k_diffusion)
    own = dataclasses.replace(own, conditioning=own.txt2img_image_conditioning(96, 96))
    enlarged = a1111.interpolate(first, 96, 96, mode="bilinear")
    taken = begin.second_pass(5, 0.7)
    latents = own.img2img(request, enlarged, **taken._asdict(), told=(96, 96))
    (image,) = draw(engine("sd1"), request)
    assert difference(image, own.decode(latents)) <= ROUNDING


def test_images_are_the_same_in_company_and_alone(
    make_slot_engine,
    checkpoint: Path,
    tmp_path,
    mixed: list[contract.ImageRequest],
):
    model = tiny_families.build_inpainting(tmp_path / "tiny", checkpoint)
    make_engine = partial(make_slot_engine, model=model, slot_weights="merged")
    alone = draw_alone(make_engine(slots=1), mixed)
    assert_alike(draw(make_engine(), *mixed), alone)


def test_controlnets_see_the_latents_alone(
    engine,
    pipeline,
    family_folder,
    tmp_path,
    pixels,
    encodes_means: None,
):
    path = tiny_controlnets.build(tmp_path / "net.safetensors", family_folder("sd1"), 0)
    network = tiny_controlnets.make(family_folder("sd1"), 0)
    request = request_of(controls=(contract.Control("net", path, pixels),))
    kind = StableDiffusionControlNetInpaintPipeline
    theirs = draw_in_diffusers(
        with_parts_of(pipeline("sd1"), kind, controlnet=network),
        request,
        image=Image.fromarray(pixels),
        mask_image=Image.new("L", (SIZE, SIZE), 255),
        control_image=Image.fromarray(pixels),
        strength=1.0,
        controlnet_conditioning_scale=1.0,
    )
    image, plain = draw(engine("sd1"), request, request_of())
    assert difference(image, theirs) <= ROUNDING
    assert difference(image, plain) > VISIBLE


def test_a_single_file_is_told_by_its_first_layer(
    folder,
    engine,
    tmp_path,
    monkeypatch,
):
    """Without a configuration of its UNet, which says so as well."""
    whole = folder("sd1")
    for part in ("vae", "text_encoder"):
        (tmp_path / part).mkdir()
        shutil.copy(whole / part / "config.json", tmp_path / part)
    config = json.loads((whole / "unet" / "config.json").read_text())
    monkeypatch.setattr(
        checkpoints.table,
        "of_file",
        lambda _: dataclasses.replace(SD1, unet_config={**config, "in_channels": 4}),
    )
    file = tmp_path / "one.safetensors"
    save_file(key_names.original_layout(whole), file)
    single = load.load_engine(load.EngineSettings(file, "cpu", slots=2))
    (one,) = draw(single, request_of())
    (other,) = draw(engine("sd1"), request_of())
    single.close()
    assert (one == other).all()


def test_such_an_sd2_predicts_epsilon_where_nothing_states_it(folder):
    """As in AUTOMATIC1111, which cannot ask its UNet without a mask."""
    unet = reading.read_network(UNet2DConditionModel, folder("sd2") / "unet")
    assert unet.config.in_channels == 9
    assert find_prediction(unet) == "epsilon"


def test_a_unet_with_other_inputs_is_refused(family_folder, tmp_path):
    shutil.copytree(family_folder("sd1"), tmp_path / "editing")
    part = tmp_path / "editing" / "unet"
    config = json.loads((part / "config.json").read_text())
    config["in_channels"] = 8
    checkpoints.UNet2DConditionModel.from_config(config).save_pretrained(part)
    with pytest.raises(errors.SetupError, match=r"1\.x's architecture"):
        load.load_engine(load.EngineSettings(tmp_path / "editing", "cpu", slots=1))

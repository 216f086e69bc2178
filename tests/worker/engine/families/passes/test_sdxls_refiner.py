"""SDXL's own refiner goes on with an image as in AUTOMATIC1111: k-diffusion's loop, two UNets.

What it is told comes from diffusers' own pipeline for it (`requires_aesthetics_score`).
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

import a1111
import key_names
import tiny_model
from drawing import assert_alike, difference, draw, draw_alone, make_request
from families import tiny_families
from imagefleet import errors
from imagefleet.job import clip
from tests.worker.engine.families.passes.test_refiner import ROUNDING, Refined
from tests.worker.engine.families.test_family_embeddings import written
from tests.worker.engine.families.test_loras import write_lora
from tests.worker.engine.families.test_single_files import open_clip, unet_of
from worker.engine import contract, load

SWITCH_AT = 0.6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def refiner_folder(family_folder, tmp_path_factory) -> Path:
    """A refiner, whose VAE is another than the tiny SDXL's: it decodes what it has drawn."""
    folder = tmp_path_factory.mktemp("refiners") / "xl-refiner"
    tiny_families.build_refiner(
        folder,
        family_folder("sdxl"),
        **tiny_model.TWO_LEVELS,
        attention_head_dim=(2, 4),
        layers_per_block=1,
    )
    (path,) = (folder / "vae").glob("*.safetensors")
    save_file(
        {name: each * 1.1 for name, each in load_file(path).items()},
        path,
        {"format": "pt"},
    )
    return folder


@pytest.fixture(scope="session")
def refiner_file(refiner_folder: Path, tmp_path_factory) -> Path:
    """The same in one file with the keys of its original release, and a configuration beside it."""
    unet = UNet2DConditionModel.from_pretrained(refiner_folder / "unet")
    prefix = "conditioner.embedders.0.model."
    weights = unet_of(refiner_folder, unet) | key_names.vae_layout(refiner_folder)
    weights |= open_clip(refiner_folder / "text_encoder_2", prefix, layers=0)
    path = tmp_path_factory.mktemp("refiner-files") / "xl-refiner-1.0.safetensors"
    save_file(weights, path)
    shutil.copytree(
        refiner_folder,
        path.with_suffix(""),
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    return path


@pytest.fixture(params=["folder", "file"])
def refiner(request, refiner_folder: Path, refiner_file: Path) -> contract.Refiner:
    return contract.Refiner(
        refiner_file if request.param == "file" else refiner_folder, SWITCH_AT
    )


@pytest.fixture(scope="session")
def pipeline(refiner_folder: Path) -> Any:
    made = StableDiffusionXLImg2ImgPipeline.from_pretrained(
        refiner_folder,
        text_encoder=None,
        tokenizer=None,
        tokenizer_2=CLIPTokenizer.from_pretrained(clip.TOKENIZER, pad_token="!"),
        add_watermarker=False,
    )
    made.set_progress_bar_config(disable=True)
    a1111.resize_last(made.unet)
    return made


@pytest.fixture
def engine(family_folder, make_engine) -> Any:
    """A tiny SDXL of its own, to break."""
    return make_engine(model=family_folder("sdxl"))


@pytest.mark.parametrize(
    ("sampler", "size", "negative", "refiner"),
    [
        ("dpmpp_2m_karras", (64, 64), "red", "folder"),
        ("euler_ancestral", (64, 64), "", "file"),
        ("heun", (96, 64), "red", "folder"),
    ],
    indirect=["refiner"],
)
def test_it_goes_on_with_its_own_unet_texts_scores_and_vae_beside_jobs_without(
    sampler: str,
    size: tuple[int, int],
    negative: str,
    refiner: contract.Refiner,
    latents: list[torch.Tensor],
    pipeline,
    family_pipeline,
    k_diffusion,
    family_engine,
):
    """To 1e-5 of the largest latent; others are as without it."""
    width, height = size
    request = make_request(
        prompt="a star", negative_prompt=negative, sampler=sampler, steps=5, seed=3
    )
    request = dataclasses.replace(request, width=width, height=height)
    refined = dataclasses.replace(request, refiner=refiner)
    engine = family_engine("sdxl")
    base = family_pipeline("sdxl")
    plain, image = draw(engine, request, refined)
    both = Refined(base, k_diffusion, second=pipeline, switch_at=SWITCH_AT)
    factor = base.vae_scale_factor
    begun = torch.zeros(1, 4, height // factor, width // factor)
    latent = both.img2img(request, begun, steps=5, t_enc=4)
    nearest = min((each - latent[0]).abs().max() for each in latents)
    assert nearest <= 1e-5 * latent.abs().max()
    decoder = a1111.Reference(pipeline, k_diffusion)
    assert difference(image, decoder.decode(latent)) <= ROUNDING
    (alone,) = draw(engine, request)
    assert difference(plain, alone) <= ROUNDING
    assert difference(image, alone) > 20, "or the test shows nothing"


@pytest.mark.parametrize("slot_weights", ["merged", "reloaded"])
def test_a_lora_changes_what_it_goes_on_with_and_nothing_after(
    slot_weights,
    refiner_folder: Path,
    family_folder,
    make_engine,
    tmp_path,
):
    """AUTOMATIC1111 adds it to layers of the same name, of which none has its shape."""
    engine = make_engine(model=family_folder("sdxl"), slot_weights=slot_weights)
    path = write_lora(
        tmp_path / "one.safetensors", engine.checkpoint, "original", seed=1
    )
    lora = contract.Lora("one", path, 0.6, 0.4)
    whole = contract.Refiner(refiner_folder)
    late = contract.Refiner(refiner_folder, SWITCH_AT)
    plain, with_lora = (
        [
            make_request(prompt="a star", seed=3, steps=4, loras=loras, refiner=each)
            for each in (whole, late, None)
        ]
        for loras in ((), (lora,))
    )
    one, other = (draw(engine, *requests) for requests in (plain, with_lora))
    assert difference(one[0], other[0]) == 0
    assert difference(one[1], other[1]) > ROUNDING
    assert difference(one[2], other[2]) > ROUNDING
    assert_alike(
        (*one, *other), draw_alone(engine, (*plain, *with_lora)), within=ROUNDING
    )
    assert engine.self_check.find_fault() is None


def test_words_of_embeddings_are_words_for_it(
    refiner_folder: Path,
    family_engine,
    tmp_path,
):
    """AUTOMATIC1111 skips those whose width is not its text encoder's, SDXL's among them."""
    tensors = {"clip_l": torch.randn(3, 32), "clip_g": torch.randn(3, 48)}
    embedding = written(tmp_path / "e.safetensors", tensors)
    plain = {"prompt": "a star easynegative"}
    changes = (plain, {**plain, "embeddings": (embedding,)})
    one, other = (
        draw(
            family_engine("sdxl"),
            *(
                make_request(steps=2, refiner=each, **change)
                for each in (contract.Refiner(refiner_folder), None)
            ),
        )
        for change in changes
    )
    assert difference(one[0], other[0]) == 0
    assert difference(one[1], other[1]) > ROUNDING, "or the embedding is none"


def test_it_is_no_model_of_its_own_and_fits_sdxls_alone(
    engine,
    refiner: contract.Refiner,
    family_engine,
):
    with pytest.raises(
        errors.SetupError, match="is an SDXL refiner checkpoint; imagefleet gen"
    ):
        load.load_engine(load.EngineSettings(refiner.path, "cpu"))
    assert load.read_beside(engine, load.EngineSettings(refiner.path, "cpu")) is None
    with pytest.raises(errors.UnusableFileError, match="is not of the kind of 'sd1'"):
        family_engine("sd1").prepare(make_request(refiner=refiner))
    hires = contract.HiresPass(96, 96, 0.7, 4, "Latent", checkpoint=refiner.path)
    with pytest.raises(
        errors.JobError, match="hr_checkpoint_name: SDXL's refiner only"
    ):
        engine.prepare(make_request(hires=hires))

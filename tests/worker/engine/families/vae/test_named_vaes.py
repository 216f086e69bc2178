"""A VAE of a file encodes and decodes in place of the checkpoint's own, beside jobs without it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

import key_names
import tiny_model
from drawing import assert_alike, difference, draw, draw_alone, make_request
from imagefleet import errors
from worker.engine import contract, load

pytestmark = pytest.mark.slow

FAMILIES = ["sd1", "sdxl"]


@pytest.fixture(scope="session")
def vaes(tmp_path_factory) -> Any:
    """The file of a random VAE for a family, in the names of *layout*, and the VAE."""

    def make(
        family: str, layout: str = "diffusers", seed: int = 7
    ) -> tuple[contract.Vae, Any]:
        folder = tmp_path_factory.mktemp("vaes")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            vae = tiny_model.make_vae(
                64, 0.13025 if family == "sdxl" else 0.18215
            ).eval()
        vae.save_pretrained(folder / "vae")
        tensors = dict(vae.state_dict())
        if layout != "diffusers":
            prefix = "" if layout == "whole" else "first_stage_model."
            named = key_names.vae_layout(folder)
            tensors = {name.removeprefix(prefix): each for name, each in named.items()}
            tensors |= {
                name: tensor[..., None, None]  # as convolutions
                for name, tensor in tensors.items()
                if "attn_1" in name and tensor.dim() > 1
            }
        if layout == "trained":
            tensors |= {
                "loss.logvar": torch.zeros(()),
                "model_ema.decay": torch.zeros(()),
            }
        path = folder / "sharp.safetensors"
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
        return contract.Vae(path.stem, path), vae

    return make


def decoded(vae: Any, latents: torch.Tensor) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        image = vae.decode(latents[None] / vae.config.scaling_factor).sample[0]
    return ((image / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0).byte().numpy()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("sd1", each) for each in ("diffusers", "original", "whole", "trained")),
        ("sdxl", "original"),
    ],
)
def test_images_are_those_that_it_makes_of_the_same_latents(
    family: str,
    layout: str,
    vaes,
    latents: list[torch.Tensor],
    family_engine,
):
    """In company of images that are decoded by the checkpoint's own."""
    named, vae = vaes(family, layout)
    engine = family_engine(family)
    requests = [
        make_request(seed=seed, vae=each) for seed in (1, 2) for each in (named, None)
    ]
    images = draw(engine, *requests)
    torch.testing.assert_close(latents[0], latents[1], rtol=0, atol=1e-4)
    for image, drawn in zip(images[::2], latents[::2], strict=True):
        assert difference(image, decoded(vae, drawn)) <= 1
    assert_alike(images[1::2], draw_alone(engine, requests[1::2]), within=1)
    assert difference(images[0], images[1]) > 20, "or the test shows nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_it_encodes_what_a_job_begins_with_and_what_is_enlarged(
    family: str,
    vaes,
    latents: list[torch.Tensor],
    pixels: contract.Pixels,
    family_engine,
    family_folder,
):
    """Drawn without noise, the latents are those that were encoded."""
    named, vae = vaes(family)
    engine = family_engine(family)
    images = (
        torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255 * 2 - 1
    )
    for each in (
        vae,
        AutoencoderKL.from_pretrained(family_folder(family) / "vae").eval(),
    ):
        with torch.no_grad():
            mean = (
                each.encode(images).latent_dist.mode()[0] * each.config.scaling_factor
            )
        coder = engine._stager._images
        if each is vae:
            coder = engine._stager._caches.vaes.get(
                engine.prepare(make_request(vae=named)).vae
            )
        torch.testing.assert_close(coder.encode(pixels), mean, rtol=1e-5, atol=1e-5)
    init = contract.InitImage(pixels, 0.4)
    hires = contract.HiresPass(96, 96, 0.4, 2, "Lanczos")
    for changes in ({"init": init}, {"hires": hires}):
        latents.clear()
        draw(engine, make_request(vae=named, **changes), make_request(**changes))
        assert (latents[0] - latents[1]).abs().max() > 0.05


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tensors: tensors.popitem(), "Missing key"),
        (lambda tensors: tensors.update(x=torch.zeros(1)), 'Unexpected key.*"x"'),
        (lambda tensors: tensors.clear(), "is no VAE of this model|Missing key"),
        (
            lambda tensors: tensors.update(
                {"decoder.conv_in.weight": torch.zeros(16, 16, 3, 3)}
            ),
            "size mismatch for decoder.conv_in.weight",
        ),
        (
            lambda tensors: tensors["decoder.conv_in.bias"].fill_(float("nan")),
            "holds NaN, infinity",
        ),
    ],
)
def test_a_file_that_does_not_fit_fails_its_job_alone(
    damage,
    reason: str,
    vaes,
    family_engine,
    tmp_path,
):
    named, _ = vaes("sd1")
    tensors = load_file(named.path)
    damage(tensors)
    save_file(tensors, tmp_path / "bad.safetensors")
    bad = contract.Vae("bad", tmp_path / "bad.safetensors")
    with pytest.raises(errors.UnusableFileError, match=f"the VAE 'bad' .*{reason}"):
        family_engine("sd1").prepare(make_request(vae=bad))


def test_taesd_decodes_in_its_place_unless_the_job_says_full(
    vaes,
    family_folder,
    family_engine,
    latents: list[torch.Tensor],
    build_taesd,
):
    named, vae = vaes("sd1")
    blocks = len(family_engine("sd1").checkpoint.vae.config.block_out_channels)
    folder = family_folder("sd1")
    engine = load.load_engine(
        load.EngineSettings(folder, "cpu", slots=2, taesd=build_taesd(blocks))
    )
    usual, full = draw(
        engine, make_request(vae=named), make_request(vae=named, decoder="Full", seed=3)
    )
    assert difference(full, decoded(vae, latents[1])) <= 1
    assert difference(usual, decoded(vae, latents[0])) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_a_workers_own_is_that_of_all_jobs_that_name_none(
    family: str,
    vaes,
    pixels: contract.Pixels,
    family_engine,
    family_folder,
):
    """Of those that begin with an image, too, and of a model that is changed to."""
    (own, _) = vaes(family, "original")
    (other, _) = vaes(family, seed=8)
    init = contract.InitImage(pixels, 0.4)
    requests = [make_request(), make_request(vae=other), make_request(init=init)]
    usual = family_engine(family)
    expected = draw(usual, *(replace(each, vae=each.vae or own) for each in requests))
    settings = load.EngineSettings(family_folder(family), "cpu", slots=3, vae=own.path)
    engine = load.load_engine(settings)
    for take in (lambda: True, load.read_beside(engine, settings)):
        assert take()
        assert_alike(draw(engine, *requests), expected, within=1)
    assert difference(expected[0], draw(usual, requests[0])[0]) > 20, (
        "or the test shows nothing"
    )
    assert engine.self_check.find_fault() is None


def test_a_workers_own_that_does_not_fit_ends_it(vaes, family_folder, tmp_path):
    named, _ = vaes("sd1")
    tensors = load_file(named.path)
    tensors.popitem()
    save_file(tensors, tmp_path / "bad.safetensors")
    settings = load.EngineSettings(
        family_folder("sd1"), "cpu", vae=tmp_path / "bad.safetensors"
    )
    with pytest.raises(
        errors.SetupError, match=r"bad.*does not fit this model: Missing key"
    ):
        load.load_engine(settings)

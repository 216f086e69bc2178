"""SDXL's VAE computes the same at a 32nd of its activations, which then fit float16."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL

import tiny_model
from worker.engine import decoder
from worker.engine.checkpoint import scale_down

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_vae() -> AutoencoderKL:
    torch.manual_seed(0)
    made = tiny_model.make_vae(64, 0.13025).eval().requires_grad_(False)
    for norm in made.decoder.modules():
        if isinstance(
            norm, torch.nn.GroupNorm
        ):  # random ones: those of a new VAE hide errors
            torch.nn.init.normal_(norm.bias, std=0.2)
            torch.nn.init.normal_(norm.weight, mean=1.0, std=0.2)
    return made


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_in_float32_only_exponents_change(
    tiny_vae: AutoencoderKL, latents: torch.Tensor
):
    scaled = copy.deepcopy(tiny_vae)
    scale_down(scaled)
    before = decoder.decode(tiny_vae, latents)[0]
    assert (decoder.decode(scaled, latents)[0] == before).all()
    torch.testing.assert_close(
        scaled.decoder(latents), tiny_vae.decoder(latents), rtol=1e-5, atol=1e-6
    )


@torch.no_grad()
def test_what_overflows_in_float16_is_drawn_right(
    tiny_vae: AutoencoderKL, latents: torch.Tensor
):
    """Its first layer writes values of up to 300,000, as SDXL's decoder does further in."""
    large = copy.deepcopy(tiny_vae)
    scale_down(large, 2.0**14)
    expected, _ = decoder.decode(large, latents)
    repaired = copy.deepcopy(large)
    scale_down(repaired)
    _, is_finite = decoder.decode(large.half(), latents)
    assert not is_finite.any()
    image, is_finite = decoder.decode(repaired.half(), latents)
    assert is_finite.all()
    error = (image.double() - expected.double()).square().mean().sqrt().item()
    assert error < 255 * 10 ** (-50 / 20), "above 50 dB"
    assert expected.double().std() > 20, "not a uniform image"

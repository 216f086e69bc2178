"""A tiny autoencoder decodes in place of the VAE."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny

from drawing import difference, draw, draw_alone, make_request
from imagefleet import errors
from worker.engine import contract, load

pytestmark = pytest.mark.slow


@pytest.fixture
def with_taesd(family_folder, family_engine, build_taesd) -> Any:
    """A family's engine with TAESD, the folder of that, and the engine without."""

    def make(family: str) -> tuple[Any, Path, Any]:
        plain = family_engine(family)
        folder = build_taesd(len(plain.checkpoint.vae.config.block_out_channels))
        settings = load.EngineSettings(
            family_folder(family), "cpu", slots=2, taesd=folder
        )
        return load.load_engine(settings), folder, plain

    return make


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_images_are_those_that_the_tiny_decoder_makes_of_the_latents(
    family: str,
    with_taesd,
    latents: list[torch.Tensor],
):
    engine, folder, plain = with_taesd(family)
    init = np.zeros((64, 64, 3), np.uint8)
    requests = [make_request(seed=1), make_request(init=contract.InitImage(init, 0.5))]
    images = draw_alone(engine, requests)
    for image, one in zip(images, latents, strict=True):
        with torch.no_grad():
            made = AutoencoderTiny.from_pretrained(folder).decode(one[None]).sample[0]
        expected = ((made / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 0).byte()
        assert difference(image, expected.numpy()) <= 1
    # The same latents, whatever decodes them: an image to begin with goes through the VAE.
    mine = list(latents)
    latents.clear()
    for request in requests:
        draw(plain, request)
    for one, other in zip(mine, latents, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def test_a_request_has_the_decoder_that_it_asks_for(with_taesd):
    (engine, _, plain) = with_taesd("sd1")
    hires = contract.HiresPass(96, 96, 0.5, 2, "Lanczos")
    for request in (make_request(), make_request(hires=hires)):
        full, tiny, usual = draw(
            engine,
            *(replace(request, decoder=each) for each in ("Full", "TAESD", None)),
        )
        assert difference(full, draw(plain, request)[0]) <= 1
        assert difference(full, tiny) > 20
        assert difference(tiny, usual) <= 1
    with pytest.raises(
        errors.JobError, match=r"sd_vae_decode_method is TAESD, .* has none"
    ):
        plain.prepare(make_request(decoder="TAESD"))


def test_what_is_none_for_the_model_is_refused(family_folder, build_taesd, tmp_path):
    for folder, complaint in (
        (tmp_path / "missing", "missing' has neither"),
        (build_taesd(1), "does not fit the model's latents"),
    ):
        with pytest.raises(errors.SetupError, match=complaint):
            load.load_engine(
                load.EngineSettings(family_folder("sd1"), "cpu", taesd=folder)
            )

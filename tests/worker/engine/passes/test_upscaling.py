"""What is between two passes, where it does not show in the images of tiny models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from worker.engine import contract
from worker.engine.passes import upscaling


def find(
    width: int, height: int, upscaler: str = "Latent", **changes: Any
) -> upscaling.Upscaling:
    hires = contract.HiresPass(width, height, 0.5, 10, upscaler, **changes)
    return upscaling.find(hires, lambda _: double)


def double(pixels: contract.Pixels, _: float) -> contract.Pixels:
    return pixels.repeat(2, axis=0).repeat(2, axis=1)


def image(width: int, height: int) -> contract.Pixels:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("target", "whole"), [((1024, 1024), (1024, 1536)), ((664, 1000), (666, 1003))]
)
def test_the_size_before_the_cut_need_not_have_whole_cells(
    target: tuple[int, int], whole: tuple[int, int]
):
    found = find(*target, whole=whole)
    latents = found.enlarge_latents(torch.zeros(4, 96, 64), 8)
    assert latents.shape == (4, whole[1] // 8, whole[0] // 8)
    assert found.crop(latents, 8).shape == (4, target[1] // 8, target[0] // 8)


def test_of_an_odd_excess_the_end_loses_more():
    found = find(1024, 1512, whole=(1024, 1536))  # 3 of 192 rows
    rows = torch.arange(192.0).expand(4, 128, 192).mT
    assert found.crop(rows, 8)[0, :, 0].tolist() == list(range(1, 190))


def test_an_upscaler_that_enlarges_too_little_is_applied_again_and_one_too_much_is_reduced():
    pixels = image(64, 96)
    found = upscaling.Upscaling((192, 288), (192, 288), None, double)
    four_times = double(double(pixels, 1), 1)
    expected = Image.fromarray(four_times).resize((192, 288), Image.Resampling.LANCZOS)
    assert (found.enlarge_pixels(pixels) == np.asarray(expected)).all()


def test_an_upscaler_that_leaves_images_as_they_are_is_applied_once():
    asked = []

    def idle(pixels: contract.Pixels, scale: float) -> contract.Pixels:
        asked.append(scale)
        return pixels

    found = upscaling.Upscaling((128, 192), (128, 192), None, idle)
    assert found.enlarge_pixels(image(64, 96)).shape == (192, 128, 3)
    assert asked == [2.0]


@pytest.mark.parametrize("upscaler", ["None", "Lanczos", "Nearest"])
def test_a_smaller_target_is_resampled_by_lanczos(upscaler: str):
    """As in AUTOMATIC1111, where upscalers only enlarge."""
    pixels = image(512, 768)
    found = find(256, 384, upscaler)
    expected = Image.fromarray(pixels).resize((256, 384), Image.Resampling.LANCZOS)
    assert (found.enlarge_pixels(pixels) == np.asarray(expected)).all()


@pytest.mark.parametrize(("width", "height"), [(1024, 1536), (664, 1000), (1000, 1504)])
@pytest.mark.parametrize(
    ("upscaler", "resampling"),
    [("Lanczos", Image.Resampling.LANCZOS), ("Nearest", Image.Resampling.NEAREST)],
)
def test_the_steps_of_resizing_are_automatic1111s(
    upscaler: str, resampling: Image.Resampling, width: int, height: int
):
    """By the scale, to multiples of 8, and to the size: often the same."""
    pixels = image(512, 768)
    found = find(width, height, upscaler)
    width, height = found.size
    scale = max(width / 512, height / 768)
    theirs = Image.fromarray(pixels).resize(
        (int(512 * scale), int(768 * scale)), resampling
    )
    aligned = int(512 * scale // 8 * 8), int(768 * scale // 8 * 8)
    for size in (aligned, (width, height)):
        if theirs.size != size:
            theirs = theirs.resize(size, Image.Resampling.LANCZOS)
    assert (found.enlarge_pixels(pixels) == np.asarray(theirs)).all()


def test_a_file_goes_before_a_name():
    assert (
        find(1024, 1536, "Latent", upscaler_path=Path("4x.safetensors")).enlarge
        is double
    )

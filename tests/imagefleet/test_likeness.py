"""Fingerprints: the same picture is near itself, and each way to spoil it is far away."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from imagefleet import likeness

Pixels = npt.NDArray[np.uint8]


def picture(seed: int, height: int = 96, width: int = 128) -> Pixels:
    """Soft colours with an object on them, as no two seeds have."""
    random = np.random.default_rng(seed)
    coarse = random.uniform(40, 200, (4, 4, 3))
    rows = np.arange(height) * 4 // height
    columns = np.arange(width) * 4 // width
    pixels = coarse[rows][:, columns]
    top = random.integers(0, height // 2)
    left = random.integers(0, width // 2)
    pixels[top : top + height // 3, left : left + width // 3] = random.uniform(
        0, 255, 3
    )
    return pixels.round().astype(np.uint8)


def rounded_elsewhere(pixels: Pixels) -> Pixels:
    """As another GPU draws it: a level or two here and there."""
    random = np.random.default_rng(1)
    changed = pixels + random.integers(-2, 3, pixels.shape) * (
        random.random(pixels.shape) < 0.1
    )
    return changed.clip(0, 255).astype(np.uint8)


def noisy(pixels: Pixels) -> Pixels:
    """2 % of the range."""
    noise = np.random.default_rng(2).normal(0, 0.02 * 255, pixels.shape)
    return (pixels + noise).round().clip(0, 255).astype(np.uint8)


def with_a_garbled_tile(pixels: Pixels) -> Pixels:
    changed = pixels.copy()
    height, width = (side // 8 for side in pixels.shape[:2])
    changed[height : 2 * height, width : 2 * width] = (
        255 - changed[height : 2 * height, width : 2 * width]
    )
    return changed


def with_swapped_channels(pixels: Pixels) -> Pixels:
    return pixels[..., ::-1]


def of_another_seed(_: Pixels) -> Pixels:
    return picture(99)


def distance(one: Pixels, other: Pixels) -> float:
    return likeness.distance(likeness.fingerprint(one), likeness.fingerprint(other))


@pytest.mark.parametrize("size", [(96, 128), (512, 512), (100, 70), (16, 16), (8, 40)])
def test_rounding_is_below_the_threshold_at_any_size(size: tuple[int, int]):
    for seed in range(5):
        drawn = picture(seed, *size)
        assert distance(drawn, drawn) == 0
        assert distance(drawn, rounded_elsewhere(drawn)) < likeness.SAME_BELOW / 2


@pytest.mark.parametrize(
    "spoil", [noisy, with_a_garbled_tile, with_swapped_channels, of_another_seed]
)
def test_each_way_to_spoil_an_image_is_above_the_threshold(
    spoil: Callable[[Pixels], Pixels],
):
    for seed in range(5):
        for size in ((96, 128), (512, 512)):
            drawn = picture(seed, *size)
            assert distance(drawn, spoil(drawn)) > 1.2 * likeness.SAME_BELOW
            assert distance(spoil(drawn), drawn) == distance(drawn, spoil(drawn))


def test_noise_is_noticed_where_most_of_the_picture_is_rough():
    random = np.random.default_rng(3)
    drawn = picture(0)
    drawn[:64] = random.integers(0, 256, (64, 128, 3))
    assert distance(drawn, noisy(drawn)) > likeness.SAME_BELOW

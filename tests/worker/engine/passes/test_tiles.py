"""Images through a network in tiles, as AUTOMATIC1111 1.10 cuts and joins them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.engine.support import esrgan
from worker.engine import contract
from worker.engine.passes import upscaling
from worker.engine.passes.upscaling import OVERLAP, Network, in_tiles

pytestmark = pytest.mark.slow


def seen_by(network: Network) -> tuple[Network, list[contract.Pixels]]:
    tiles = []

    def run(tile: contract.Pixels) -> np.ndarray:
        tiles.append(tile)
        return network(tile)

    return run, tiles


def double(tile: contract.Pixels) -> np.ndarray:
    return np.float32(tile.repeat(2, axis=0).repeat(2, axis=1)) / 255


def by_call(*levels: float) -> Network:
    """Every tile all of one level, the next of these."""
    left = iter(levels)
    return lambda tile: np.full(tile.shape, next(left), np.float32)


@pytest.mark.parametrize(
    ("width", "starts"),
    [
        (192, [0]),
        (193, [0, 1]),
        (500, [0, 154, 308]),
        (512, [0, 160, 320]),
        (600, [0, 136, 272, 408]),
    ],
)
def test_tiles_begin_where_split_grid_has_them(width: int, starts: list[int]):
    run, tiles = seen_by(double)
    image = esrgan.picture(192, width)
    in_tiles(run, image, 2, 192)
    assert len(tiles) == len(starts)
    for tile, start in zip(tiles, starts, strict=True):
        assert np.array_equal(tile, image[:, start : start + 192])


def test_before_an_image_smaller_than_a_tile_it_is_black():
    run, tiles = seen_by(double)
    image = esrgan.picture(100, 60)
    assert np.array_equal(in_tiles(run, image, 2, 192), image.repeat(2, 0).repeat(2, 1))
    (tile,) = tiles
    assert np.array_equal(tile[92:, 132:], image)
    assert not tile[:92].any()
    assert not tile[:, :132].any()


@pytest.mark.parametrize("averaged", [False, True])
def test_a_network_that_looks_at_each_pixel_alone_gives_the_same_in_tiles(
    averaged: bool,
):
    image = esrgan.picture(250, 430)
    found = in_tiles(double, image, 2, 192, averaged=averaged)
    assert np.array_equal(found, image.repeat(2, 0).repeat(2, 1))


def test_a_tile_fades_in_over_the_first_pixels_that_it_shares():
    image = esrgan.picture(192, 320)  # tiles from 0 and 128 on, which share 64 pixels
    row = in_tiles(by_call(0, 1), image, 1, 192)[50, :, 0]
    ramp = [int(at * 255 / OVERLAP) for at in range(OVERLAP)]
    assert row.tolist() == [0] * 128 + ramp + [255] * (192 - OVERLAP)
    column = in_tiles(by_call(0, 1), image.transpose(1, 0, 2), 1, 192)[:, 50, 0]
    assert column.tolist() == row.tolist()


def test_tiles_of_swinir_and_scunet_are_averaged_before_they_are_rounded():
    image = esrgan.picture(192, 376)  # tiles from 0 and 184 on
    row = in_tiles(by_call(0.101, 0.904), image, 1, 192, averaged=True)[0, :, 0]
    shared = round((0.101 + 0.904) / 2 * 255)
    assert row.tolist() == [26] * 184 + [shared] * OVERLAP + [231] * 184
    run, tiles = seen_by(by_call(0.5))
    in_tiles(run, esrgan.picture(100, 100), 1, 192, averaged=True)
    assert tiles[0].shape == (100, 100, 3)


def test_a_network_of_a_file_runs_in_these_tiles(tmp_path):
    path, network = esrgan.build(tmp_path / "4x.safetensors")
    image = esrgan.picture(24, 320)
    found = upscaling.UpscalerCache(torch.device("cpu")).get(path).enlarge(image)
    ends = (
        esrgan.enlarge(network, image[:, :192]),
        esrgan.enlarge(network, image[:, 128:]),
    )
    assert np.array_equal(found[:, : 4 * 128], ends[0][:, : 4 * 128])
    assert np.array_equal(found[:, 4 * (128 + OVERLAP) :], ends[1][:, 4 * OVERLAP :])

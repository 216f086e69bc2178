"""Images through a network in tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.passes import upscaling


@given(st.integers(1, 3000), st.integers(33, 700))
def test_the_tiles_of_a_side_cover_it_and_share_as_many_pixels_as_they_should(
    length: int, tile: int
) -> None:
    spans = upscaling.spans(length, tile)
    assert spans[0][0] == 0
    assert spans[-1][1] == length
    assert {end - start for start, end in spans} == {min(tile, length)}
    shared = [one[1] - other[0] for one, other in itertools.pairwise(spans)]
    assert all(each >= upscaling.OVERLAP - 1 for each in shared)  # they are at whole pixels


@pytest.mark.parametrize("tile", [40, 64, 100, 500])
def test_a_network_that_looks_at_each_pixel_alone_gives_the_same_in_tiles(tile: int) -> None:
    image = torch.rand(3, 150, 230)

    def network(batch: torch.Tensor) -> torch.Tensor:
        return F.interpolate(batch.sqrt(), scale_factor=2, mode="nearest")

    expected = network(image[None])[0]
    torch.testing.assert_close(upscaling.run_in_tiles(network, image, 2, tile), expected)


def test_a_network_that_sees_less_far_than_tiles_share_leaves_no_seam() -> None:
    image = torch.rand(3, 200, 90)

    def network(
        batch: torch.Tensor,
    ) -> torch.Tensor:  # each pixel depends on those 4 around it; at a tile's edge on zeros
        return F.avg_pool2d(batch, 9, 1, padding=4)

    whole = network(image[None])[0]
    cut = upscaling.run_in_tiles(network, image, 1, 64)
    assert (whole - cut).abs().max() < 0.06  # 0.5 at the edges of tiles that share nothing


def test_no_call_is_larger_than_a_tile() -> None:
    shapes = []

    def network(batch: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(batch.shape))
        return batch

    upscaling.run_in_tiles(network, torch.rand(3, 130, 70), 1, 64)
    assert set(shapes) == {(1, 3, 64, 64)}

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from diffusers.models.upsampling import Upsample2D
from torch import nn

from worker.engine.kernels import layers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [(8, 8), (5, 3), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_folded_convolution_matches_up_to_the_edges(
    size: tuple[int, int], bias: bool
):
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 4, 3, padding=1, bias=bias)
    x = torch.randn(2, 6, *size)
    with torch.no_grad():
        expected = conv(F.interpolate(x, scale_factor=2.0))
        ours = layers.upsample(x, layers.fold(conv.weight), conv.bias)
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("folds", [True, False])
def test_sides_that_do_not_halve_evenly_are_resized_after_the_convolution(
    folds: bool,
):
    torch.manual_seed(0)
    original = Upsample2D(8, use_conv=True)
    ours = layers.Upsampler(original)
    if folds:
        ours.fold()
    for height, width in itertools.product((1, 2, 9, 10, 127), repeat=2):
        x = torch.randn(1, 8, -(-height // 2), -(-width // 2))
        with torch.no_grad():
            expected = F.interpolate(original(x), (height, width), mode="nearest")
            found = ours(x, torch.Size((height, width)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("folds", [True, False])
def test_an_image_that_tiles_is_padded_with_its_other_side(folds: bool):
    torch.manual_seed(0)
    ours = layers.Upsampler(Upsample2D(8, use_conv=True))
    if folds:
        ours.fold()
    twin = layers.tiling(ours)
    assert twin.conv.weight is ours.conv.weight
    around = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
    around.load_state_dict(ours.conv.state_dict())
    x = torch.randn(2, 8, 5, 4)
    with torch.no_grad():
        expected = around(F.interpolate(x, scale_factor=2.0))
        torch.testing.assert_close(ours(x, tiles=True), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(twin(x), expected, atol=1e-5, rtol=0)
        assert (ours(x) - expected)[..., 1:-1, 1:-1].abs().max() < 1e-5
        assert (ours(x) - expected).abs().max() > 0.1


def test_changed_weights_are_folded_into_the_same_memory():
    ours = layers.Upsampler(Upsample2D(8, use_conv=True))
    ours.fold()
    recorded = ours.folded
    before = recorded.clone()
    x = torch.randn(1, 8, 4, 4)
    with torch.no_grad():
        ours.conv.weight.mul_(2)
        ours.fold()
        expected = ours.conv(F.interpolate(x, scale_factor=2.0))
        assert torch.allclose(ours(x), expected, atol=1e-5)
    assert ours.folded is recorded, "a CUDA graph reads the recorded address"
    assert torch.allclose(recorded, 2 * before)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from worker.engine.kernels import layers

Normalise = Callable[[torch.Tensor, nn.GroupNorm], torch.Tensor]


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (32, 16)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("normalise", [layers.normalise, layers.normalise_uncompiled])
def test_the_output_matches_torch_at_any_size_and_mean(
    normalise: Normalise, size: tuple[int, int], offset: float
) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(4, 24, eps=1e-5)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 24, *size).to(memory_format=torch.channels_last) + offset
    with torch.no_grad():
        expected = norm(x)
        ours = normalise(x, norm)
    assert torch.allclose(ours, expected, atol=1e-3 if offset else 1e-5)
    assert ours.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("normalise", [layers.normalise, layers.normalise_uncompiled])
@torch.no_grad()
def test_a_constant_group_is_not_nan(normalise: Normalise) -> None:
    x = torch.full((1, 8, 4, 4), 1000.3)
    assert normalise(x, nn.GroupNorm(2, 8)).isfinite().all()


def test_in_float16_squares_and_shifts_beyond_its_range_do_not_overflow() -> None:
    x = torch.randn(1, 8, 16, 16).half().to(memory_format=torch.channels_last) + 600
    norm = nn.GroupNorm(2, 8, eps=1e-6).requires_grad_(requires_grad=False)
    expected = norm(x.float())
    ours = layers.normalise_uncompiled(x, norm.half())
    assert ours.dtype == torch.float16
    # The mean is 600 times the standard deviation.
    assert torch.allclose(ours.float(), expected, atol=0.3)

    constant = torch.full_like(x, 200.0)
    norm.eps = 1e-10
    assert layers.normalise_uncompiled(constant, norm).isfinite().all()


def test_a_network_keeps_its_parameters_and_their_names() -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Sequential(nn.GroupNorm(2, 8, eps=1e-6)))
    before = dict(network.named_parameters())
    layers.replace_group_norms(network)
    after = dict(network.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    norm = network[1][0]
    assert isinstance(norm, layers.ChannelsLastGroupNorm)
    assert norm.eps == 1e-6

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from worker.engine.kernels import layers

pytestmark = pytest.mark.slow

Normalise = Callable[[torch.Tensor, nn.GroupNorm], torch.Tensor]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(x: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    assert layers.runs_programs(x.cuda()), "the kernels were not built"
    return layers.normalise_and_activate(x.cuda(), copy.deepcopy(norm).cuda()).cpu()


NORMALISE = [layers.normalise, pytest.param(on_gpu, marks=needs_gpu)]


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (32, 16)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("normalise", NORMALISE)
def test_the_output_matches_torch_at_any_size_and_mean(
    normalise: Normalise, size: tuple[int, int], offset: float
):
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


@pytest.mark.parametrize("normalise", NORMALISE)
@torch.no_grad()
def test_a_constant_group_is_not_nan(normalise: Normalise):
    x = torch.full((1, 8, 4, 4), 1000.3)
    assert normalise(x, nn.GroupNorm(2, 8)).isfinite().all()


@needs_gpu
@torch.no_grad()
def test_more_programs_than_a_grids_second_side_takes_reach_the_last_pixel():
    """As in SDXL's VAE at 1024x1024, and beyond 2 ** 31 numbers."""
    for rows, side in ((2, 1024), (1, 3000)):
        x = torch.randn(rows, 256, side, side, dtype=torch.float16, device="cuda")
        x = x.to(memory_format=torch.channels_last)
        ours = layers.normalise_and_activate(x, nn.GroupNorm(32, 256).half().cuda())
        for part in (ours[:, :, :1], ours[:, :, -1:]):
            rows_of = (
                x[:, :, :1] if part.data_ptr() == ours.data_ptr() else x[:, :, -1:]
            )
            assert (part - rows_of).abs().max() < 0.1, (
                "the mean is 0 and the deviation 1"
            )


@needs_gpu
def test_in_float16_squares_and_shifts_beyond_its_range_do_not_overflow():
    x = torch.randn(1, 8, 16, 16).half().to(memory_format=torch.channels_last) + 600
    norm = nn.GroupNorm(2, 8, eps=1e-6).requires_grad_(requires_grad=False)
    expected = norm.double()(x.double()).float()  # float32 loses the variance on a CPU
    ours = on_gpu(x, norm.half())
    assert ours.dtype == torch.float16
    # The mean is 600 times the standard deviation.
    assert torch.allclose(ours.float(), expected, atol=0.3)

    constant = torch.full_like(x, 200.0)
    norm.eps = 1e-10
    assert on_gpu(constant, norm).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_what_is_added_and_activated_in_the_same_kernel_is_what_torch_computes(
    device: str, dtype: torch.dtype
):
    torch.manual_seed(0)
    for rows, channels, height, width, groups in (
        (2, 64, 16, 16, 32),
        (3, 96, 9, 7, 4),
    ):
        norm = nn.GroupNorm(groups, channels, eps=1e-6)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        x = 3 * torch.randn(rows, channels, height, width) + 1
        added = torch.randn(rows, channels)
        expected = F.silu(norm(x + added[:, :, None, None]))
        moved = (each.to(device, dtype) for each in (x, added))
        x = next(moved)
        added = next(moved)
        ours = layers.normalise_and_activate(
            x, norm.to(device, dtype), added=added, activates=True
        )
        torch.testing.assert_close(ours.float().cpu(), expected, atol=1e-2, rtol=1e-2)
        if dtype is torch.float32:
            torch.testing.assert_close(ours.cpu(), expected, atol=1e-5, rtol=1e-5)
    gates = torch.randn(3, 5, 74)
    values, gated = gates.chunk(2, dim=-1)
    ours = layers.gate(gates.to(device, dtype)).float().cpu()
    torch.testing.assert_close(ours, values * F.gelu(gated), atol=1e-2, rtol=1e-2)

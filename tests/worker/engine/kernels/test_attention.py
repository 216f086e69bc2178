import pytest
import torch

from worker.engine.kernels import layers

pytestmark = pytest.mark.slow


def test_a_kernel_that_gives_nan_is_never_chosen():
    expected = torch.linspace(-1, 1, 64)
    nan = expected.clone()
    nan[3] = torch.nan

    assert layers.is_accurate(expected * 1.01, expected)
    assert not layers.is_accurate(expected * 1.1, expected)
    assert not layers.is_accurate(nan, expected)
    assert not layers.is_accurate(torch.full_like(expected, torch.inf), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_the_chosen_kernel_is_right_in_every_precision(dtype: torch.dtype):
    q, k, v = torch.randn(3, 2, 4, 256, 16, dtype=dtype, device="cuda")

    attended = layers.KernelSelector().select(q, k, v)(q, k, v)

    assert layers.is_accurate(attended, layers.default_attention(q, k, v))

"""The decoder in stripes computes what it computes whole."""

import numpy as np
import pytest
import torch

import tiny_model
from worker.engine import decoder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [(2, 4, 24, 16), (1, 4, 8, 24), (1, 4, 9, 8)])
@torch.no_grad()
def test_stripes_have_no_seams(shape: tuple[int, ...]):
    """Images of 192 and 72 rows, and of fewer than a stripe has in the first layers."""
    torch.manual_seed(0)
    vae = tiny_model.make_vae(64).eval().requires_grad_(False)
    for norm in vae.decoder.modules():
        if isinstance(norm, torch.nn.GroupNorm):
            torch.nn.init.normal_(norm.bias, std=0.2)
            torch.nn.init.normal_(norm.weight, mean=1.0, std=0.2)
    latents = torch.randn(shape)
    whole = vae.decoder(latents)
    torch.testing.assert_close(
        decoder.decode_in_stripes(vae.decoder, latents), whole, rtol=1e-4, atol=1e-5
    )
    images = (
        decoder.to_images(vae, latents, in_stripes=each) for each in (False, True)
    )
    one, other = (decoder.to_pixels(each)[0] for each in images)
    assert np.abs(one.numpy().astype(int) - other.numpy().astype(int)).max() <= 1
    assert one.float().std() > 20, "not a uniform image"
    by_layout = vae.to(memory_format=torch.channels_last)
    striped = decoder.decode_in_stripes(by_layout.decoder, latents)
    torch.testing.assert_close(striped, whole, rtol=1e-4, atol=1e-5)

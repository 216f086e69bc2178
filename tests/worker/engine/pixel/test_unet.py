"""The UNet with its text computed once, in float64, against diffusers' whole UNet."""

import pytest
import torch

from pixel import tiny_cascade
from worker.engine.networks.transformer import Call
from worker.engine.pixel.unet import PixelUnet

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "noise_level"), [("base", None), ("sr", 250)])
def test_each_slot_gets_what_the_whole_unet_gives_alone(stage, noise_level):
    torch.manual_seed(0)
    original = tiny_cascade.make_unet(stage).double().eval()
    torch.manual_seed(0)
    unet = PixelUnet(tiny_cascade.make_unet(stage).double().eval())
    side = original.config.sample_size
    x = torch.randn(3, original.config.in_channels, side, side, dtype=torch.float64)
    times = torch.tensor([999.0, 500.0, 0.0])
    states = torch.randn(3, 2, 77, 32, dtype=torch.float64)
    context = torch.empty(6, 77, unet.context_width, dtype=torch.float64)
    added = torch.empty(6, unet.added_width, dtype=torch.float64)
    level = None if noise_level is None else (torch.tensor([noise_level]),)
    for slot, own in enumerate(states):
        rows = slice(2 * slot, 2 * slot + 2)
        unet.compute_prompt(own, level, {}, context[rows], added[rows])
    with torch.no_grad():
        found = unet(x, times, Call(context), added)
        for slot, at in enumerate(times):
            levels = None if noise_level is None else torch.full((2,), noise_level)
            expected = original(
                x[slot].expand(2, -1, -1, -1), at, states[slot], class_labels=levels
            ).sample
            rows = found[2 * slot : 2 * slot + 2]
            assert torch.allclose(rows, expected, rtol=0, atol=1e-11)

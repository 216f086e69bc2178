"""Group normalisation that compiles to memory-bound kernels for channels-last tensors.

Inductor compiles torch's own group norm to kernels that read channels-last tensors group by group,
in pieces of 20 bytes: half of the VAE's time. Here sums are taken per channel first, and then
combined into groups.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from worker.engine.kernels import replace_modules

#: Pixels per partial sum: enough sums to keep a GPU busy, few compared with the tensor.
_PIXELS = 256


class ChannelsLastGroupNorm(nn.GroupNorm):
    """nn.GroupNorm with the same parameters; compiled on a GPU, its sums are ordered by channel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        is_image = input.dim() == 4  # noqa: PLR2004 - rows, channels, height, width
        is_large = is_image and input.shape[2] * input.shape[3] >= _PIXELS
        if is_large and torch.compiler.is_compiling() and input.device.type == "cuda":
            return normalise(input, self.num_groups, self.weight, self.bias, self.eps)
        return super().forward(input)


def normalise(
    x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Group norm of x [rows, channels, height, width], in float32 inside.

    The variance is E[x^2] - E[x]^2: in float32 accurate to 1e-4 while a group's mean is less than
    thirty times its standard deviation.
    """
    rows, channels, height, width = x.shape
    pixels = math.gcd(height * width, _PIXELS)
    values = x.permute(0, 2, 3, 1).reshape(rows, -1, pixels, channels).float()
    in_group = height * width * channels // groups

    def mean_of_groups(sums: torch.Tensor) -> torch.Tensor:
        return sums.view(rows, -1, groups, channels // groups).sum((1, 3)) / in_group

    mean = mean_of_groups(values.sum(2))
    variance = (mean_of_groups((values * values).sum(2)) - mean * mean).clamp(min=0)
    scale = (variance + eps).rsqrt()[:, :, None] * weight.float().view(groups, -1)
    shift = bias.float().view(groups, -1) - mean[:, :, None] * scale
    scale, shift = (each.reshape(rows, channels, 1, 1) for each in (scale, shift))
    return (x.float() * scale + shift).to(x.dtype)


def replace(network: nn.Module) -> None:
    """Replaces all affine group norms of a network; the parameters stay the same objects."""
    replace_modules(network, _replacement)


def _replacement(norm: nn.Module) -> ChannelsLastGroupNorm | None:
    if type(norm) is not nn.GroupNorm or not norm.affine:
        return None
    with torch.device("meta"):
        ours = ChannelsLastGroupNorm(norm.num_groups, norm.num_channels, norm.eps)
    ours.weight, ours.bias = norm.weight, norm.bias
    return ours.train(norm.training)

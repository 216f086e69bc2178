"""Group normalisation that the compiler turns into kernels as fast as the memory.

A group's channels lie side by side in channels-last tensors, its places do not. What torch's own
group norm is compiled to reads them group by group, in pieces of 20 bytes: the VAE spent half its
time there. Here sums are taken channel by channel, and groups formed of the few that are left.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from worker.engine.kernels.substitute import substitute

#: Places that are summed up at first: enough sums to keep a GPU busy, few beside the tensor.
_PLACES = 256


class ChannelsLastGroupNorm(nn.GroupNorm):
    """torch's own, with the same parameters; another way to the same numbers where compiled."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        is_image = input.dim() == 4  # noqa: PLR2004 - rows, channels, height, width
        is_large = is_image and input.shape[2] * input.shape[3] >= _PLACES
        if is_large and torch.compiler.is_compiling() and input.device.type == "cuda":
            return normalise(input, self.num_groups, self.weight, self.bias, self.eps)
        return super().forward(input)


def normalise(
    x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Group norm of x [rows, channels, height, width], in float32 inside.

    The variance is the mean of the squares less the square of the mean: in float32, good to 1e-4
    as long as a group's mean is less than thirty times its deviation.
    """
    rows, channels, height, width = x.shape
    places = math.gcd(height * width, _PLACES)
    values = x.permute(0, 2, 3, 1).reshape(rows, -1, places, channels).float()
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
    """Puts these in the place of all affine group norms of a network; their parameters stay."""
    substitute(network, _ours)


def _ours(norm: nn.Module) -> ChannelsLastGroupNorm | None:
    if type(norm) is not nn.GroupNorm or not norm.affine:
        return None
    with torch.device("meta"):
        ours = ChannelsLastGroupNorm(norm.num_groups, norm.num_channels, norm.eps)
    ours.weight, ours.bias = norm.weight, norm.bias
    return ours.train(norm.training)

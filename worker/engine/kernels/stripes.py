"""The VAE's decoder in stripes of rows: the same image with well under half of the memory.

Each layer is computed to its end before the next, its input a stripe at a time with the rows that a
convolution needs beside it. Group norms take the whole image first, so no seams appear, as they do
between tiles that are decoded apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

#: Of a layer's output; even, for upsampling.
ROWS = 64


def decode(decoder: Any, latents: torch.Tensor) -> torch.Tensor:
    """What diffusers' decoder computes [rows, 3, height, width]."""
    x: torch.Tensor = decoder.mid_block(decoder.conv_in(latents))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = _add_resnet(resnet, x)
        for sampler in block.upsamplers or ():
            x = _upsample(sampler.conv, x)
    return _normalise_and_convolve(decoder.conv_norm_out, decoder.conv_out, x)


def _add_resnet(resnet: Any, x: torch.Tensor) -> torch.Tensor:
    inner = _normalise_and_convolve(resnet.norm1, resnet.conv1, x)
    output = _normalise_and_convolve(resnet.norm2, resnet.conv2, inner)
    del inner
    for at in range(0, x.shape[2], ROWS):
        part = x[:, :, at : at + ROWS]
        kept = part if resnet.conv_shortcut is None else resnet.conv_shortcut(part)
        output[:, :, at : at + ROWS] += kept
    return output


def _normalise_and_convolve(norm: nn.GroupNorm, conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """A 3x3 convolution of the activated group norm."""
    scale, shift = _scale_and_shift(norm, x)
    height = x.shape[2]
    output = _empty(x, conv.out_channels, height, x.shape[3])
    for at in range(0, height, ROWS):
        top, bottom = max(0, at - 1), min(height, at + ROWS + 1)
        part = (x[:, :, top:bottom].float() * scale + shift).to(x.dtype)
        _convolve(conv, F.silu(part), output, at)
    return output


def _upsample(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Each pixel twice in both directions, then a 3x3 convolution."""
    height = 2 * x.shape[2]
    output = _empty(x, conv.out_channels, height, 2 * x.shape[3])
    for at in range(0, height, ROWS):
        first = max(0, at // 2 - 1)
        part = x[:, :, first : (at + ROWS) // 2 + 1]
        part = F.interpolate(part, scale_factor=2.0, mode="nearest")
        begin = max(0, at - 1) - 2 * first
        _convolve(conv, part[:, :, begin : at + ROWS + 1 - 2 * first], output, at)
    return output


def _convolve(conv: nn.Conv2d, part: torch.Tensor, output: torch.Tensor, at: int) -> None:
    """Fills the stripe from row *at* on; *part* has a row more at each end inside the image."""
    is_last = at + ROWS >= output.shape[2]
    part = F.pad(part, (0, 0, 0 if at else 1, 1 if is_last else 0))
    output[:, :, at : at + ROWS] = F.conv2d(part, conv.weight, conv.bias, padding=(0, 1))


def _scale_and_shift(norm: nn.GroupNorm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the whole image as a product and a sum in float32 [rows, channels, 1, 1]."""
    rows, channels, height, width = x.shape
    groups = norm.num_groups
    in_group = height * width * channels // groups

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        """Of sums [rows, channels] in each group, for each channel."""
        means = values.view(rows, groups, -1).sum(2) / in_group
        return means.repeat_interleave(channels // groups, dim=1)[:, :, None, None]

    stripes = torch.split(x, ROWS, dim=2)
    mean = mean_of(_sum([part.float().sum((2, 3)) for part in stripes]))
    squares = [(part.float() - mean).square_().sum((2, 3)) for part in stripes]
    scale = (mean_of(_sum(squares)) + norm.eps).rsqrt()
    scale = scale * norm.weight.float()[:, None, None]
    return scale, norm.bias.float()[:, None, None] - mean * scale


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


def _empty(like: torch.Tensor, channels: int, height: int, width: int) -> torch.Tensor:
    is_last = like.is_contiguous(memory_format=torch.channels_last)
    return torch.empty(
        (len(like), channels, height, width),
        dtype=like.dtype,
        device=like.device,
        memory_format=torch.channels_last if is_last else torch.contiguous_format,
    )

"""Nearest-neighbour upsampling by two and a 3x3 convolution, as one convolution of the input.

After the upsampling, several of a kernel's nine weights meet the same input pixel. Added up, each
of the four output pixels per input pixel needs a 2x2 kernel: 16 products instead of 36. That saves
5 % of the UNet's work and 15 % of the VAE's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from worker.engine.kernels import replace_modules

_KERNEL = (3, 3)


def fold(weight: torch.Tensor) -> torch.Tensor:
    """The four kernels [4 * out, in, 2, 2] for one kernel [out, in, 3, 3]; rounded once.

    In the order of the output pixels: top left, top right, bottom left, bottom right.
    """

    def fold_dim(three: torch.Tensor, dim: int) -> torch.Tensor:
        first, middle, last = three.unbind(dim)
        before = torch.stack([first, middle + last], dim)
        return torch.stack([before, torch.stack([first + middle, last], dim)])

    by_column = fold_dim(weight.float(), 3)
    by_row = fold_dim(by_column, 3)
    return by_row.flatten(0, 2).to(weight.dtype)


def upsample(x: torch.Tensor, folded: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The convolution of x [rows, in, height, width] upsampled by two: [rows, out, 2h, 2w]."""
    # [rows, height + 1, width + 1, 2, 2, out]: the output pixels (a, b) are shifted by a and b.
    shifted = F.conv2d(x, folded, padding=1).permute(0, 2, 3, 1)
    shifted = shifted.reshape(*shifted.shape[:3], 2, 2, -1)
    down, right = (torch.arange(2 * side, device=x.device) for side in x.shape[2:])
    pixels = shifted[
        :, ((down + 1) // 2)[:, None], (right + 1) // 2, (down % 2)[:, None], right % 2
    ]
    if bias is not None:
        pixels = pixels + bias
    return pixels.permute(0, 3, 1, 2)


class Upsampler(nn.Module):
    """diffusers' Upsample2D with a convolution; the same parameters."""

    folded: torch.Tensor | None

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.conv = original.conv
        self.register_buffer("folded", None, persistent=False)

    def fold(self) -> None:
        """Folds the weights; call again whenever they change."""
        if self.conv.kernel_size != _KERNEL:
            return
        folded = fold(self.conv.weight.detach())
        if self.folded is None:
            if folded.device.type == "cuda":
                folded = folded.contiguous(memory_format=torch.channels_last)
            self.folded = folded
        else:
            self.folded.copy_(folded)

    def forward(self, x: torch.Tensor, output_size: torch.Size | None = None) -> torch.Tensor:
        """Upsamples x [rows, channels, height, width] by two, or to *output_size*."""
        height, width = x.shape[2:]
        doubled = (2 * height, 2 * width)
        size = doubled if output_size is None else tuple(output_size)
        if self.folded is not None and size == doubled:
            return upsample(x, self.folded, self.conv.bias)
        # diffusers' own forward copies to another memory format from 64 rows on.
        resized: torch.Tensor = self.conv(F.interpolate(x, size=size))
        return resized


def replace(network: nn.Module) -> None:
    """Replaces all of diffusers' upsamplers with a convolution, weights folded."""
    replace_modules(network, _replacement)


def _replacement(original: nn.Module) -> Upsampler | None:
    from diffusers.models.upsampling import Upsample2D

    if not isinstance(original, Upsample2D) or not original.use_conv or original.norm is not None:
        return None
    ours = Upsampler(original)
    ours.fold()
    return ours

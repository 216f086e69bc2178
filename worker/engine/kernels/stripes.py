"""The VAE's decoder in stripes of rows: the same image with a third of the memory.

Each layer is computed to its end before the next, its input a stripe at a time with the rows that a
convolution needs beside it. Group norms take the whole image first, so no seams appear. Upsampled
images are never held: their rows are computed each time they are needed, three times in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

#: Rows of a layer's output in a stripe; even, for upsampling.
ROWS = 32


@dataclass(frozen=True, slots=True)
class _Image:
    """A layer's input; with *conv*, each pixel of x twice in both directions, then convolved."""

    x: torch.Tensor
    """[rows, channels, height, width]"""
    conv: nn.Conv2d | None = None

    @property
    def height(self) -> int:
        return self.x.shape[2] * (1 if self.conv is None else 2)

    def part(self, top: int, bottom: int) -> torch.Tensor:
        """The image's rows of pixels from *top* to *bottom*, without the latter."""
        if self.conv is None:
            return self.x[:, :, top:bottom]
        above, below = max(0, top - 1), min(self.height, bottom + 1)
        first = above // 2
        part = F.interpolate(self.x[:, :, first : (below + 1) // 2], scale_factor=2.0)
        part = part[:, :, above - 2 * first : below - 2 * first]
        return _convolve(self.conv, part, top == 0, bottom == self.height)


def decode(decoder: Any, latents: torch.Tensor) -> torch.Tensor:
    """What diffusers' decoder computes [rows, 3, height, width]."""
    x: torch.Tensor = decoder.mid_block(decoder.conv_in(latents))
    image: _Image = _Image(x)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = _add_resnet(resnet, image)
            image = _Image(x)
        for sampler in block.upsamplers or ():  # one at most
            image = _Image(x, sampler.conv)
    return _join(_normalise_and_convolve(decoder.conv_norm_out, decoder.conv_out, image), image)


def _add_resnet(resnet: Any, image: _Image) -> torch.Tensor:
    """A residual block's output, in the place of its input where that has the same shape."""
    inner = _Image(_join(_normalise_and_convolve(resnet.norm1, resnet.conv1, image), image))
    in_place = image.conv is None and resnet.conv_shortcut is None
    output = image.part(0, image.height) if in_place else torch.empty_like(inner.x)
    for top, changed in _normalise_and_convolve(resnet.norm2, resnet.conv2, inner):
        bottom = top + changed.shape[2]
        part = image.part(top, bottom)
        if resnet.conv_shortcut is not None:
            part = resnet.conv_shortcut(part)
        torch.add(changed, part, out=output[:, :, top:bottom])
    return output


def _join(parts: Iterator[tuple[int, torch.Tensor]], image: _Image) -> torch.Tensor:
    """The whole of what is computed a stripe at a time, as high as *image*."""
    output: torch.Tensor | None = None
    for top, part in parts:
        if output is None:
            is_last = part.is_contiguous(memory_format=torch.channels_last)
            output = torch.empty(
                (*part.shape[:2], image.height, part.shape[3]),
                dtype=part.dtype,
                device=part.device,
                memory_format=torch.channels_last if is_last else torch.contiguous_format,
            )
        output[:, :, top : top + part.shape[2]] = part
    if output is None:
        raise ValueError("an image without rows")
    return output


def _normalise_and_convolve(
    norm: nn.GroupNorm, conv: nn.Conv2d, image: _Image
) -> Iterator[tuple[int, torch.Tensor]]:
    """A 3x3 convolution of the activated group norm: stripes and the rows that they begin at."""
    scale, shift = _scale_and_shift(norm, image)
    for top, bottom in _stripes(image):
        above, below = max(0, top - 1), min(image.height, bottom + 1)
        normed = image.part(above, below).to(torch.float32, copy=True).mul_(scale).add_(shift)
        activated = F.silu(normed.to(conv.weight.dtype), inplace=True)
        yield top, _convolve(conv, activated, top == 0, bottom == image.height)


def _stripes(image: _Image) -> Iterator[tuple[int, int]]:
    for top in range(0, image.height, ROWS):
        yield top, min(top + ROWS, image.height)


def _convolve(conv: nn.Conv2d, part: torch.Tensor, is_first: bool, is_last: bool) -> torch.Tensor:
    """*part* has a row more at each end inside the image."""
    part = F.pad(part, (0, 0, int(is_first), int(is_last)))
    return F.conv2d(part, conv.weight, conv.bias, padding=(0, 1))


def _scale_and_shift(norm: nn.GroupNorm, image: _Image) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the whole image as a product and a sum in float32 [rows, channels, 1, 1].

    Stripes' means and squares are combined as by Chan, Golub and LeVeque (1979): one pass, without
    the cancellation of a sum of squares.
    """
    counts, means, squares = [], [], []
    for top, bottom in _stripes(image):
        part = image.part(top, bottom).float()
        grouped = part.view(len(part), norm.num_groups, -1, *part.shape[2:])
        mean = grouped.mean((2, 3, 4))
        counts.append(grouped[0, 0].numel())
        means.append(mean)
        squares.append((grouped - mean[:, :, None, None, None]).square_().sum((2, 3, 4)))
    weights = torch.tensor(counts, device=means[0].device)[:, None, None] / sum(counts)
    each = torch.stack(means)
    mean = (weights * each).sum(0)
    variance = torch.stack(squares).sum(0) / sum(counts) + (weights * (each - mean) ** 2).sum(0)

    def of_channels(values: torch.Tensor) -> torch.Tensor:
        per_group = norm.num_channels // norm.num_groups
        return values.repeat_interleave(per_group, dim=1)[:, :, None, None]

    scale = of_channels((variance + norm.eps).rsqrt()) * norm.weight.float()[:, None, None]
    return scale, norm.bias.float()[:, None, None] - of_channels(mean) * scale

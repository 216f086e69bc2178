"""Makes SDXL's VAE fit float16, by powers of two: the same function on smaller activations.

Between its first and its last layer, SDXL's decoder reaches values beyond float16's 65,504, and the
image is NaN. But each of these values is only added to others, convolved, or normalised in groups,
and a group norm does not care about a factor. So all of them are computed at a 32nd of their size:
what writes them has its weights divided, and the norms that read them their epsilon (by the
square). In float32 the images stay the same to the bit: only exponents change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

#: float16 then holds what would be 2.1 million, and has all its digits down to what would be 0.002.
FACTOR = 1 / 32


@torch.no_grad()
def scale_down(vae: Any, factor: float = FACTOR) -> None:
    """Scales the decoder's activations in place; call before its weights are rounded."""
    decoder = vae.decoder
    _scale_output(decoder.conv_in, factor)
    _scale_epsilon(decoder.conv_norm_out, factor)
    for resnet in _resnets(decoder):
        # What the first convolution writes is read by the second norm alone.
        for norm, conv in ((resnet.norm1, resnet.conv1), (resnet.norm2, resnet.conv2)):
            _scale_epsilon(norm, factor)
            _scale_output(conv, factor)
        if resnet.conv_shortcut is not None:
            _scale_bias(resnet.conv_shortcut, factor)
    for attention in decoder.mid_block.attentions:
        if attention is not None:
            _scale_epsilon(attention.group_norm, factor)
            _scale_output(attention.to_out[0], factor)
    for block in decoder.up_blocks:
        for sampler in block.upsamplers or ():
            _scale_bias(sampler.conv, factor)


def _resnets(decoder: Any) -> Iterator[Any]:
    for block in (decoder.mid_block, *decoder.up_blocks):
        yield from block.resnets


def _scale_output(layer: nn.Module, factor: float) -> None:
    """Scales the output of a layer whose input keeps its size."""
    layer.weight.mul_(factor)  # type: ignore[operator]
    _scale_bias(layer, factor)


def _scale_bias(layer: nn.Module, factor: float) -> None:
    """Scales the bias of a layer whose input is scaled already."""
    if isinstance(layer.bias, torch.Tensor):
        layer.bias.mul_(factor)


def _scale_epsilon(norm: Any, factor: float) -> None:
    norm.eps *= factor**2

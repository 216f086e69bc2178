"""Makes SDXL's VAE fit float16, by powers of two: the same function on smaller activations.

Between its first and its last layer, SDXL's decoder reaches values beyond float16's 65,504, and the
image is NaN. But each of these values is only added to others, convolved, or normalised in groups,
and a group norm does not care about a factor. So all of them are computed at a 32nd of their size:
what writes them has its weights divided, and the norms that read them their epsilon. In float32 the
images stay the same to the bit: only exponents change.
"""

from __future__ import annotations

from typing import Any

import torch

#: float16 then holds what would be 2.1 million, and has all its digits down to what would be 0.002.
FACTOR = 1 / 32


@torch.no_grad()
def scale_down(vae: Any, factor: float = FACTOR) -> None:
    """Scales the decoder's activations in place; call before its weights are rounded."""
    decoder = vae.decoder
    resnets = [
        resnet for block in (decoder.mid_block, *decoder.up_blocks) for resnet in block.resnets
    ]
    attentions = [each for each in decoder.mid_block.attentions if each is not None]
    samplers = [each.conv for block in decoder.up_blocks for each in block.upsamplers or ()]
    # What a first convolution writes is read by the second norm alone.
    norms = [decoder.conv_norm_out, *(each.group_norm for each in attentions)]
    norms += [norm for resnet in resnets for norm in (resnet.norm1, resnet.norm2)]
    # Their input keeps its size, and that of the others is scaled already.
    writers = [decoder.conv_in, *(each.to_out[0] for each in attentions)]
    writers += [conv for resnet in resnets for conv in (resnet.conv1, resnet.conv2)]
    others = [each.conv_shortcut for each in resnets if each.conv_shortcut is not None]
    for layer in writers:
        layer.weight.mul_(factor)
    for layer in (*writers, *others, *samplers):
        if layer.bias is not None:
            layer.bias.mul_(factor)
    for norm in norms:
        norm.eps *= factor**2

"""The layers' names in the code of those who made a network, after which many LoRAs name them."""

import itertools
import re
from collections.abc import Callable, Collection

import torch
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
)

#: Paths of layers in diffusers by their original names: several are one layer there, with the rows
#: of all.
Names = dict[str, tuple[str, ...]]

#: Gives those of a network's paths in diffusers.
OriginalNames = Callable[[Collection[str]], Names]

_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "norm2": "out_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_PART = re.compile(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(\w+)\.(\d+)\.(.+)")


def unet_names(paths: Collection[str]) -> Names:
    """Those of Stability's UNets; a layer without another has its own."""
    originals = original_names(paths)
    return {originals.get(path, path): (path,) for path in paths}


def original_names(paths: Collection[str]) -> dict[str, str]:
    """The original name of each of a UNet's layers, by its path in diffusers."""
    names = {path: _OUTER[path] for path in paths if path in _OUTER}
    found = {path: match.groups() for path in paths if (match := _PART.fullmatch(path))}
    # On the way up, each block has one resnet more.
    layers = max(
        (int(at) for _, _, part, at, _ in found.values() if part == "resnets"),
        default=0,
    )
    attending = {
        (side, block)
        for side, block, part, _, _ in found.values()
        if part == "attentions"
    }
    for path, (side, block, part, at, inner) in found.items():
        # Samplers are numbered after a block's last resnet, or with it.
        number = int(block or 0) * (layers + 1) + (
            layers if "samplers" in part else int(at)
        )
        after = "2" if (side, block) in attending else "1"
        within = {"attentions": "1", "upsamplers": after}.get(part, "0")
        outer = {
            "down": f"input_blocks.{number + 1}.{within}",
            "up": f"output_blocks.{number}.{within}",
            None: f"middle_block.{2 * int(at) + (part == 'attentions')}",
        }
        own = {"resnets": _RESNET.get(inner, inner), "downsamplers": "op"}.get(
            part, inner
        )
        names[path] = f"{outer[side]}.{own}"
    return names


#: FLUX.2's layers in Black Forest Labs' code, with a block's number open. Without the last
#: modulation, whose halves are exchanged in diffusers.
_KLEIN = (
    "img_in",
    "txt_in",
    "time_in.in_layer",
    "time_in.out_layer",
    "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.lin",
    "single_stream_modulation.lin",
    "final_layer.linear",
    "double_blocks.{}.img_attn.qkv",
    "double_blocks.{}.img_attn.proj",
    "double_blocks.{}.img_mlp.0",
    "double_blocks.{}.img_mlp.2",
    "double_blocks.{}.txt_attn.qkv",
    "double_blocks.{}.txt_attn.proj",
    "double_blocks.{}.txt_mlp.0",
    "double_blocks.{}.txt_mlp.2",
    "single_blocks.{}.linear1",
    "single_blocks.{}.linear2",
)


def klein_names(paths: Collection[str]) -> Names:
    """Black Forest Labs' own, for the double blocks' queries, keys and values as one layer.

    Beside them an alias that some exports have, cut off at its beginning.
    """
    names: Names = {}
    for path in paths:
        if path.startswith("transformer_blocks."):
            names[path.removeprefix("tran")] = (path,)
    numbers = {path.split(".")[1] for path in paths if "_blocks." in path}
    for template, number in itertools.product(_KLEIN, numbers):
        original = template.format(number)
        # As diffusers names the tensors of a file, which it takes apart where they are joined.
        weights = {f"{original}.weight": torch.empty(3, 0)}
        named = convert_flux2_transformer_checkpoint_to_diffusers(weights)
        members = tuple(key.removesuffix(".weight") for key in named)
        if set(paths).issuperset(members):
            names[original] = members
    return names

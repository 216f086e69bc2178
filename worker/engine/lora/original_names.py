"""The UNet's layers as Stability's own code names them, and kohya's LoRAs for SDXL after it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

_RESNET = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
}
_MIDDLE = {
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}


def original_names(paths: Iterable[str]) -> dict[str, str]:
    """The original name of each of a UNet's layers, by its path in diffusers."""
    layers = list(paths)
    places = {**_MIDDLE, **dict(_sides(layers))}
    names = {}
    for path in layers:
        if path in _OUTER:
            names[path] = _OUTER[path]
            continue
        place = next((each for each in places if path.startswith(f"{each}.")), None)
        if place is None:
            continue
        inner = path.removeprefix(f"{place}.")
        if ".resnets." in place:
            inner = _RESNET.get(inner, inner)
        elif "downsamplers" in place:
            inner = "op"
        names[path] = f"{places[place]}.{inner}"
    return names


def _sides(layers: list[str]) -> Iterator[tuple[str, str]]:
    """The parts of the blocks on the way down and up: numbered through by resnets and samplers."""
    sides = (("down_blocks", "input_blocks", 1), ("up_blocks", "output_blocks", 0))
    for side, name, first in sides:
        number = first
        for block, parts in _by_block(layers, side):
            for at in range(parts["resnets"]):
                yield f"{block}.resnets.{at}", f"{name}.{number}.0"
                yield f"{block}.attentions.{at}", f"{name}.{number}.1"
                number += 1
            if "downsamplers" in parts:
                yield f"{block}.downsamplers.0", f"{name}.{number}.0"
                number += 1
            if "upsamplers" in parts:
                # After the last layer's resnet and, if there is one, its attention.
                place = 2 if "attentions" in parts else 1
                yield f"{block}.upsamplers.0", f"{name}.{number - 1}.{place}"


def _by_block(layers: list[str], side: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Each block of a side, and how many resnets, attentions and samplers it has."""
    blocks: dict[int, dict[str, int]] = {}
    for path in layers:
        if match := re.match(rf"{side}\.(\d+)\.(\w+)\.(\d+)\.", path):
            parts = blocks.setdefault(int(match[1]), {})
            parts[match[2]] = max(parts.get(match[2], 0), int(match[3]) + 1)
    for number, parts in sorted(blocks.items()):
        yield f"{side}.{number}", parts

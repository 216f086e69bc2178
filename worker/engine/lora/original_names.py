"""The UNet's layers as Stability's own code names them, and kohya's LoRAs for SDXL after it."""

import re
from collections.abc import Collection

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

"""The layers' names in the code of those who made a network, after which many LoRAs name them."""

import re
from collections.abc import Callable, Collection, Mapping

#: Gives, for the paths of a network's layers in diffusers, each original name's own: several are
#: one layer there, with the rows of all.
OriginalNames = Callable[[Collection[str]], Mapping[str, tuple[str, ...]]]

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


def unet_names(paths: Collection[str]) -> dict[str, tuple[str, ...]]:
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


#: FLUX.2's layers outside of blocks.
_KLEIN = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out",
}
_KLEIN_DOUBLE = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
_KLEIN_SINGLE = {
    "linear1": ("attn.to_qkv_mlp_proj",),
    "linear2": ("attn.to_out",),
}


def klein_names(paths: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Black Forest Labs' own, for the double blocks' queries, keys and values as one layer.

    Beside them an alias that some exports have, cut off at its beginning. Not of the last
    modulation, whose halves are exchanged in diffusers.
    """
    names: dict[str, tuple[str, ...]]
    names = {name: (path,) for name, path in _KLEIN.items()}
    blocks = {".".join(path.split(".")[:2]) for path in paths if "_blocks." in path}
    for block in blocks:
        kind, _, number = block.partition(".")
        of_block = _KLEIN_DOUBLE if kind == "transformer_blocks" else _KLEIN_SINGLE
        start = "double_blocks" if of_block is _KLEIN_DOUBLE else "single_blocks"
        for name, own in of_block.items():
            members = tuple(f"{block}.{each}" for each in own)
            names[f"{start}.{number}.{name}"] = members
            if of_block is _KLEIN_DOUBLE:
                for member in members:
                    names[member.replace("transformer_", "sformer_")] = (member,)
    known = set(paths)
    return {name: own for name, own in names.items() if known.issuperset(own)}

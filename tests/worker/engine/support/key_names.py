"""The keys of checkpoints and LoRAs, as other tools write them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

_PEFT_SIDES = {"down": "A", "up": "B"}


def original_layout(checkpoint: Path) -> dict[str, torch.Tensor]:
    """A diffusers checkpoint's weights with the keys of SD1.5's original release."""
    return {
        **_renamed(checkpoint / "unet", "model.diffusion_model.", unet_names()),
        **vae_layout(checkpoint),
        **_renamed(
            checkpoint / "text_encoder", "cond_stage_model.transformer.text_model.", {}
        ),
    }


def vae_layout(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Those of its VAE alone, of any number of blocks."""
    config = json.loads((checkpoint / "vae" / "config.json").read_text())
    names = _vae_names(len(config["block_out_channels"]))
    return _renamed(checkpoint / "vae", "first_stage_model.", names)


def _renamed(
    folder: Path, prefix: str, names: dict[str, str]
) -> dict[str, torch.Tensor]:
    """A network's weights; the first prefix in *names* that matches a key is replaced."""
    (file,) = folder.glob("*.safetensors")
    renamed = {}
    for key, weight in load_file(file).items():
        bare = key.removeprefix("text_model.")
        start = next((name for name in names if bare.startswith(name)), "")
        renamed[prefix + names.get(start, "") + bare.removeprefix(start)] = weight
    return renamed


_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def unet_names(layers: int = 1) -> dict[str, str]:
    """Diffusers' prefixes to the original ones, for four blocks; those up have one layer."""
    places = {
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.resnets.1": "middle_block.2",
    }
    names = {
        "time_embedding.linear_1.": "time_embed.0.",
        "time_embedding.linear_2.": "time_embed.2.",
        "conv_in.": "input_blocks.0.0.",
        "conv_norm_out.": "out.0.",
        "conv_out.": "out.2.",
        "mid_block.attentions.0.": "middle_block.1.",
    }
    for block in range(4):
        down = (layers + 1) * block
        up = 2 * block
        for layer in range(layers):
            at = down + 1 + layer
            places[f"down_blocks.{block}.resnets.{layer}"] = f"input_blocks.{at}.0"
            names[f"down_blocks.{block}.attentions.{layer}."] = f"input_blocks.{at}.1."
        names[f"down_blocks.{block}.downsamplers.0.conv."] = (
            f"input_blocks.{down + layers + 1}.0.op."
        )
        for layer in range(2):
            places[f"up_blocks.{block}.resnets.{layer}"] = (
                f"output_blocks.{up + layer}.0"
            )
            names[f"up_blocks.{block}.attentions.{layer}."] = (
                f"output_blocks.{up + layer}.1."
            )
        # The first up block has no attention, so its upsampler comes right after the resnet.
        names[f"up_blocks.{block}.upsamplers.0."] = (
            f"output_blocks.{up + 1}.{1 if block == 0 else 2}."
        )
    for place, original in places.items():
        for part, original_part in _RESNET.items():
            names[f"{place}.{part}."] = f"{original}.{original_part}."
    return names


def _vae_names(blocks: int) -> dict[str, str]:
    names = {
        "encoder.conv_norm_out.": "encoder.norm_out.",
        "decoder.conv_norm_out.": "decoder.norm_out.",
    }
    attention = {
        "group_norm": "norm",
        "to_q": "q",
        "to_k": "k",
        "to_v": "v",
        "to_out.0": "proj_out",
    }
    places = {}
    for half in ("encoder", "decoder"):
        for part, original in attention.items():
            names[f"{half}.mid_block.attentions.0.{part}."] = (
                f"{half}.mid.attn_1.{original}."
            )
        for layer in range(2):
            places[f"{half}.mid_block.resnets.{layer}."] = (
                f"{half}.mid.block_{layer + 1}."
            )
    for block in range(blocks):
        places[f"encoder.down_blocks.{block}.resnets.0."] = (
            f"encoder.down.{block}.block.0."
        )
        names[f"encoder.down_blocks.{block}.downsamplers.0."] = (
            f"encoder.down.{block}.downsample."
        )
        for layer in range(2):
            places[f"decoder.up_blocks.{block}.resnets.{layer}."] = (
                f"decoder.up.{blocks - 1 - block}.block.{layer}."
            )
        names[f"decoder.up_blocks.{block}.upsamplers.0."] = (
            f"decoder.up.{blocks - 1 - block}.upsample."
        )
    for place, original in places.items():
        names[f"{place}conv_shortcut."] = f"{original}nin_shortcut."
        names[place] = original
    return names


def respell(
    path: Path, model: Path, spelling: str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A kohya LoRA for the model in a folder, with the keys and metadata of another tool."""
    layers = _kohya_names(model)
    alphas = set()
    renamed = {}
    for key, weight in load_file(path).items():
        flat, part = key.split(".", 1)
        if part == "alpha":
            alphas.add(weight.item())
            continue
        network, name = layers[flat]
        side = "down" if "down" in part else "up"
        if spelling == "peft":
            new = f"base_model.model.{network}.{name}.lora_{_PEFT_SIDES[side]}.weight"
        elif spelling == "diffusers":
            new = f"{network}.{name}.lora.{side}.weight"
        elif name.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            parent, leaf = name.removesuffix(".0").rsplit(".", 1)
            new = f"{network}.{parent}.processor.{leaf}_lora.{side}.weight"
        elif network == "text_encoder":
            new = f"{network}.{name}.lora_linear_layer.{side}.weight"
        else:
            new = f"{network}.{name}.lora.{side}.weight"
        renamed[new] = weight
    (alpha,) = alphas
    config = {"unet.lora_alpha": alpha, "text_encoder.lora_alpha": alpha}
    return renamed, {"format": "pt", "lora_adapter_metadata": json.dumps(config)}


def _kohya_names(model: Path) -> dict[str, tuple[str, str]]:
    names = {}
    for network, prefix, level in (
        ("unet", "lora_unet_", ""),
        ("text_encoder", "lora_te_text_model_", "text_model."),
    ):
        (weights,) = (model / network).glob("*.safetensors")
        with safe_open(weights, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                path = key.removesuffix(".weight").removeprefix("text_model.")
                names[prefix + path.replace(".", "_")] = (network, level + path)
    return names

"""The ControlNets that an engine holds: each file is read and checked once, and copied once.

A file in diffusers' names or in those of the original release (`control_model.`) has no
configuration that could be relied on: a ControlNet is a copy of a UNet's first half, so the
checkpoint's own UNet says what it must look like. SDXL's smaller ones leave attentions out, which
their tensors tell.
"""

import inspect
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from diffusers import ControlNetModel
from diffusers.loaders.single_file_utils import (
    DIFFUSERS_TO_LDM_MAPPING,
    convert_controlnet_checkpoint,
)
from torch import Tensor

from imagefleet.files.safetensors import Identity, UnusableError
from imagefleet.validation import JSONDict, JSONObject
from worker.engine.control.network import SlotControlNet
from worker.engine.families import table
from worker.engine.files import safetensors
from worker.engine.files.network_cache import NetworkCache, assign
from worker.engine.files.safetensors import Tensors
from worker.engine.kernels import layers
from worker.engine.passes.begin import PreparedControl

#: Prefix of the original release; whole checkpoints with a ControlNet have other tensors beside.
_PREFIX = "control_model."

#: A tensor that every ControlNet has, in diffusers' names and the original ones.
_HINT = "controlnet_cond_embedding.conv_in.weight"
_ORIGINAL_HINT = "input_hint_block.0.weight"

#: SDXL's tensors with their original names, which diffusers' conversion leaves out.
_ADDED: Mapping[str, str] = DIFFUSERS_TO_LDM_MAPPING["controlnet"][
    "addition_embed_type"
]

#: Families by the numbers of a prompt's vectors.
_MADE_FOR = {
    family.unet_config["cross_attention_dim"]: family.name for family in table.FAMILIES
}

_ATTENTION = re.compile(
    r"down_blocks\.(\d+)\.attentions\.0\.(?:transformer_blocks\.(\d+)\.)?"
)

#: What the conversion raises for names that are no ControlNet's.
_CONVERSION_ERRORS = (
    KeyError,
    ValueError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
)


class ControlNets(NetworkCache[SlotControlNet]):
    """Cache of ControlNets: those that lanes use, and some for the next jobs."""

    def __init__(self, unet: Any, *, has_own_layers: bool) -> None:
        """*unet* is the checkpoint's, on its device; *has_own_layers*: so have ControlNets."""
        super().__init__("ControlNet", unet.device, unet.dtype)
        self._config = dict(unet.config)
        self._has_own_layers = has_own_layers
        self._hints = WeakKeyDictionary[PreparedControl, Tensor]()

    def embed(self, control: PreparedControl) -> Tensor:
        """A request's embedded image; remembered for the other images of its job."""
        if (hint := self._hints.get(control)) is None:
            network = self.get(control.identity)
            hint = self._hints[control] = network.embed(control.pixels)
            self._synchronize()  # meanwhile another thread may drop the network
        return hint

    def close(self) -> None:
        super().close()
        self._hints.clear()

    def load(self, identity: Identity) -> ControlNetModel:
        found = _in_diffusers_names(safetensors.tensors_of(identity), self._config)
        _check_family(found, self._config)
        with torch.device("meta"):
            network = ControlNetModel(**_config(found, self._config))
        assign(network, found, self._dtype)
        return network

    def finish(self, network: ControlNetModel, path: Path) -> SlotControlNet:
        if self._has_own_layers:
            layers.replace_modules(network, layers.group_norm)
        with torch.no_grad():
            # Averaged over the image: "shuffle" ones, by the name alone, as in sd-webui-controlnet.
            return SlotControlNet(network, pools="shuffle" in path.stem.lower())


def _in_diffusers_names(tensors: Tensors, unet_config: JSONObject) -> Tensors:
    own = {
        each.removeprefix(_PREFIX): tensor
        for each, tensor in tensors.items()
        if each.startswith(_PREFIX)
    } or dict(tensors)
    if _HINT in own:
        return own
    if _ORIGINAL_HINT not in own or "time_embed.0.weight" not in own:
        raise UnusableError("is not a ControlNet")
    try:
        converted = convert_controlnet_checkpoint(own, unet_config)
    except _CONVERSION_ERRORS as error:
        raise UnusableError(
            f"is damaged: its tensors cannot be named ({error!r})"
        ) from error
    converted |= {name: own.get(original) for name, original in _ADDED.items()}
    return {each: tensor for each, tensor in converted.items() if tensor is not None}


def _check_family(tensors: Tensors, unet_config: JSONObject) -> None:
    own = unet_config["cross_attention_dim"]
    widths = {
        each.shape[-1]
        for key, each in tensors.items()
        if key.endswith("attn2.to_k.weight")
    }
    has_added = "add_embedding.linear_1.weight" in tensors
    takes_added = unet_config.get("addition_embed_type") is not None
    if has_added == takes_added and widths <= {own}:
        return
    width = max(widths, default=0)
    made_for = "SDXL" if has_added else _MADE_FOR.get(width, "another model")
    raise UnusableError(
        f"was made for {made_for} and prompts' vectors of {width:,} numbers; this model's have"
        f" {own:,}"
    )


def _config(tensors: Tensors, unet_config: JSONObject) -> JSONDict:
    known = inspect.signature(ControlNetModel.__init__).parameters
    config = {key: value for key, value in unet_config.items() if key in known}
    hint = tensors[_HINT]
    # Every second layer halves the image and has more channels.
    names = (
        f"controlnet_cond_embedding.blocks.{at}.weight" for at in itertools.count(1, 2)
    )
    wider = [
        tensors[name].shape[0]
        for name in itertools.takewhile(tensors.__contains__, names)
    ]
    config |= {
        # It sees the latents alone, with inpainting checkpoints as well.
        "in_channels": unet_config["out_channels"],
        "conditioning_channels": hint.shape[1] if hint.dim() > 1 else 0,
        "conditioning_embedding_out_channels": (hint.shape[0], *wider),
    }
    if unet_config.get("addition_embed_type") is not None:
        # Which of SDXL's attentions it has.
        depths: dict[int, int] = {}
        for match in filter(None, map(_ATTENTION.match, tensors)):
            block = int(match[1])
            depth = int(match[2] or -1) + 1
            depths[block] = max(depths.get(block, 0), depth)
        types = unet_config["down_block_types"]
        layers = unet_config["transformer_layers_per_block"]
        layers = [layers] * len(types) if isinstance(layers, int) else layers
        config |= {
            "down_block_types": [
                own_type if block in depths else "DownBlock2D"
                for block, own_type in enumerate(types)
            ],
            "transformer_layers_per_block": [
                depths.get(block, layer) for block, layer in enumerate(layers)
            ],
        }
        if not any(each.startswith("mid_block.attentions.") for each in tensors):
            config["mid_block_type"] = "UNetMidBlock2D"
    return config

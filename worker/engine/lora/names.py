"""The keys of LoRA files: which layer of the model, and which tensor of its change.

Three naming schemes are in use: kohya's (`lora_unet_..._to_q.lora_down.weight`), diffusers'
(`unet....to_q.lora.down.weight`, and older ones) and peft's (`....lora_A.weight`). LyCORIS uses
kohya's for its own kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from worker.engine.lora.original_names import original_names

Network = Literal["unet", "text_encoder", "text_encoder_2"]
LayerId = tuple[Network, str]
"""A layer's network and its path there."""

#: What follows the layer's name in a key, and our name of the tensor.
_TENSORS = {
    r"\.alpha": "alpha",
    r"(?:\.lora_down|\.lora_A|\.lora(?:_linear_layer)?\.down|_lora\.down)\.weight": "down",
    r"(?:\.lora_up|\.lora_B|\.lora(?:_linear_layer)?\.up|_lora\.up)\.weight": "up",
    r"\.lora_mid\.weight": "mid",
    r"\.(hada_(?:w[12]_[ab]|t[12]))": r"\2",
    r"\.(lokr_(?:w[12](?:_[ab])?|t2))": r"\2",
    r"\.diff": "diff",
    r"\.dora_scale": "dora_scale",
    r"\.lora_magnitude_vector(?:\.weight)?": "magnitude",
}
_TENSORS_BY_PATTERN = [(re.compile(f"(.+?){ending}"), name) for ending, name in _TENSORS.items()]

#: Kinds that are recognised by their keys, but not supported.
_UNSUPPORTED_KINDS = (
    (re.compile(r".+\.(oft_blocks|oft_diag|oft_R(\.weight)?)"), "an OFT or BOFT"),
    (re.compile(r".+\.on_input"), "an IA3"),
    (re.compile(r".+\.[ab][12]\.weight"), "a GLoRA"),
    (re.compile(r".+\.[wb]_norm"), "a change of normalisation layers"),
    (re.compile(r".+\.(diff_b|lora_up\.bias|lora_B\.bias)"), "a change of biases"),
    (re.compile(r"(emb_params|bundle_emb\..+|string_to_param.*)"), "a textual inversion"),
)

_MODELS_BY_KEY = (
    (re.compile(r"lora_te2_|text_encoder_2\.|conditioner[._]"), "SDXL"),
    (re.compile(r"lora_unet_(input_blocks|output_blocks|middle_block)_"), "SDXL"),
    (re.compile(r".*(double_blocks|single_blocks|single_transformer_blocks)[._]"), "Flux"),
    (re.compile(r".*joint_blocks[._]"), "SD3"),
)
#: Prefixes of what trainers write into the header.
_MODELS_BY_METADATA = {
    "ss_base_model_version": {
        "sd_v2": "SD2",
        "sdxl": "SDXL",
        "sd3": "SD3",
        "flux": "Flux",
    },
    "modelspec.architecture": {
        "stable-diffusion-v2": "SD2",
        "stable-diffusion-xl": "SDXL",
        "stable-diffusion-v3": "SD3",
        "flux": "Flux",
    },
}
#: SD2's LoRAs have SD1's layer names; only the text encoder's width differs.
_MODELS_BY_WIDTH = {768: "SD1", 1024: "SD2", 2048: "SDXL"}
_TEXT_KEY = re.compile(r".*attn2[._]to_[kv]\.lora(_down|_A|\.down)\.weight")

#: Keys that are remembered: all kinds of tensors of SD1.5's layers, as several programs write them.
_MAX_PLACES = 20_000


class Layers:
    """The layers of a model that LoRAs can change, by every name that files use."""

    def __init__(self, unet: nn.Module, text_encoders: Mapping[Network, nn.Module]) -> None:
        self.shapes: dict[LayerId, torch.Size] = {}
        self._by_name: dict[str, LayerId] = {}
        # By a tensor's key; files that the same program wrote have the same ones.
        self._places: dict[str, tuple[LayerId, str]] = {}
        layers = adaptable_layers(unet)
        originals = original_names(layers)
        for path, layer in layers.items():
            self.shapes["unet", path] = layer.weight.shape
            for name in {path, path.removesuffix(".0")}:  # `to_out.0` was once `to_out`
                self._name("unet", path, name, f"unet.{name}")
            for name in {path, originals.get(path, path)}:
                self._name("unet", path, "lora_unet_" + name.replace(".", "_"))
        for network, text_encoder in text_encoders.items():
            # The first of two has a number, too.
            prefixes = ["lora_te2"] if network == "text_encoder_2" else ["lora_te", "lora_te1"]
            self._name_text_encoder(network, text_encoder, prefixes)

    def _name_text_encoder(
        self, network: Network, text_encoder: nn.Module, prefixes: Sequence[str]
    ) -> None:
        for path, layer in adaptable_layers(text_encoder).items():
            self.shapes[network, path] = layer.weight.shape
            # transformers 5.6 dropped the level; files may have it.
            short = path.removeprefix("text_model.")
            old = re.sub(r"\b(?:([qkv])_proj|(out)_proj)$", r"to_\1\2", short)
            for name in {short, old, f"text_model.{short}", f"text_model.{old}"}:
                flat = name.replace(".", "_")
                self._name(network, path, f"{network}.{name}")
                self._name(network, path, *(f"{prefix}_{flat}" for prefix in prefixes))

    def _name(self, network: Network, path: str, *names: str) -> None:
        for name in names:
            self._by_name[name] = (network, path)

    def place(self, key: str) -> tuple[LayerId, str] | None:
        """The layer and the tensor that a LoRA file's *key* names, if both are known."""
        if (known := self._places.get(key)) is not None:
            return known
        split = None if unsupported_kind(key) else split_key(key)
        layer = self.find(split[0]) if split else None
        if split is None or layer is None:
            return None
        if len(self._places) < _MAX_PLACES:
            self._places[key] = layer, split[1]
        return layer, split[1]

    def find(self, name: str) -> LayerId | None:
        """The layer that a LoRA file calls *name*."""
        plain = name.removeprefix("base_model.model.").replace(".processor.", ".")
        return self._by_name.get(plain)


def adaptable_layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers that LoRAs can change, by path."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def split_key(key: str) -> tuple[str, str] | None:
    """The layer's name and the tensor's, or None if the key has no known suffix."""
    plain = re.sub(r"\.default(?=\.weight$|$)", "", key)
    for pattern, name in _TENSORS_BY_PATTERN:
        if match := pattern.fullmatch(plain):
            return match[1], match.expand(name)
    return None


def unsupported_kind(key: str) -> str | None:
    """The unsupported kind that a key belongs to, with its article, or None."""
    return next((kind for pattern, kind in _UNSUPPORTED_KINDS if pattern.fullmatch(key)), None)


def made_for(shapes: Mapping[str, Iterable[int]], metadata: Mapping[str, str]) -> str | None:
    """The model a file was made for, if its header, keys or shapes show it."""
    for field, models in _MODELS_BY_METADATA.items():
        stated = metadata.get(field, "")
        for start, model in models.items():
            if stated.startswith(start):
                return model
    for key, shape in shapes.items():
        for pattern, model in _MODELS_BY_KEY:
            if pattern.match(key):
                return model
        if _TEXT_KEY.fullmatch(key):
            found = _MODELS_BY_WIDTH.get((0, *shape)[-1])
            if found:
                return found
    return None

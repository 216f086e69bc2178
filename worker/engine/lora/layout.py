"""Which layers a LoRA file's tensors change, by their keys; files of one program share a layout.

To place and check hundreds of tensors takes Python longer than to read them all, and Python does so
on one core only, which it shares with the engine's own thread.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from imagefleet.files import contents
from imagefleet.files.safetensors import Header
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Place, UnusableError
from worker.engine.lora import kinds

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

#: The UNet's layers as Stability's own code names them, and kohya's LoRAs for SDXL after it.
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
_RESNET = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_PART = re.compile(r"((?:(down|up)_blocks\.(\d+)|mid_block)\.(\w+)\.(\d+))\.(.+)")

#: Keys that are remembered: all kinds of tensors of SD1.5's layers, as several programs write them.
_MAX_PLACES = 20_000


class Layers:
    """The layers of a model that LoRAs can change, by every name that files use; thread-safe."""

    def __init__(self, unet: nn.Module, text_encoders: Mapping[Network, nn.Module]) -> None:
        self.shapes: dict[LayerId, torch.Size] = {}
        self._by_name: dict[str, LayerId] = {}
        self._layouts = functools.lru_cache(_MAX_LAYOUTS)(self._make)
        # By a tensor's key; files that the same program wrote have the same ones.
        self._places: dict[str, tuple[LayerId, str]] = {}
        layers = adaptable_layers(unet)
        originals = original_names(layers)
        for path, layer in layers.items():
            self.shapes["unet", path] = layer.weight.shape
            dotted = {path, path.removesuffix(".0")}  # `to_out.0` was once `to_out`
            flat = {path, originals.get(path, path)}
            self._name("unet", path, ("", "unet."), dotted)
            self._name("unet", path, ("lora_unet_",), map(_flat, flat))
        for network, text_encoder in text_encoders.items():
            # The first of two has a number, too.
            prefixes = {"text_encoder_2": ("lora_te2_",)}.get(network, ("lora_te_", "lora_te1_"))
            for path, layer in adaptable_layers(text_encoder).items():
                self.shapes[network, path] = layer.weight.shape
                # transformers 5.6 dropped the level; files may have it.
                short = path.removeprefix("text_model.")
                old = re.sub(r"\b(?:([qkv])_proj|(out)_proj)$", r"to_\1\2", short)
                names = {short, old, f"text_model.{short}", f"text_model.{old}"}
                self._name(network, path, (f"{network}.",), names)
                self._name(network, path, prefixes, map(_flat, names))

    def _name(
        self, network: Network, path: str, prefixes: Sequence[str], names: Iterable[str]
    ) -> None:
        for prefix, name in itertools.product(prefixes, names):
            self._by_name[prefix + name] = (network, path)

    def layout_of(self, content: safetensors.Content) -> Layout:
        """The layout of a file, which those of one program share; for `safetensors.named`."""
        find = self._layouts if len(content.header) <= _MAX_KEPT_CHARACTERS else self._make
        try:
            return find(content.header, len(content.data))
        except _UnfitError as error:
            places = safetensors.places(content.header, len(content.data))
            shapes = {name: place.shape for name, place in places.items()}
            what = contents.identify(Header(shapes, content.metadata, len(content.data))).name
            raise UnusableError(f"does not fit this model (it is {what}): {error}") from error

    def _make(self, header: str, data_bytes: int) -> Layout:
        places = safetensors.places(header, data_bytes)
        if not places:
            raise UnusableError("holds no weights")
        return Layout(places, self)

    def place(self, key: str) -> tuple[LayerId, str] | None:
        """The layer and the tensor that a LoRA file's *key* names, if both are known."""
        if (known := self._places.get(key)) is not None:
            return known
        name, tensor = ("", "") if unsupported_kind(key) else split_key(key)
        if (layer := self.find(name)) is None:
            return None
        if len(self._places) < _MAX_PLACES:
            self._places[key] = layer, tensor
        return layer, tensor

    def find(self, name: str) -> LayerId | None:
        """The layer that a LoRA file calls *name*."""
        plain = name.removeprefix("base_model.model.").replace(".processor.", ".")
        return self._by_name.get(plain)


def original_names(paths: Collection[str]) -> dict[str, str]:
    """The original name of each of a UNet's layers, by its path in diffusers."""
    names = {path: _OUTER[path] for path in paths if path in _OUTER}
    found = {path: match.groups() for path in paths if (match := _PART.fullmatch(path))}
    # On the way up, each block has one resnet more.
    layers = max(
        (int(at) for _, _, _, part, at, _ in found.values() if part == "resnets"), default=0
    )
    attending = {
        (side, block) for _, side, block, part, _, _ in found.values() if part == "attentions"
    }
    for path, (place, side, block, part, at, inner) in found.items():
        # Samplers are numbered after a block's last resnet, or with it.
        number = int(block or 0) * (layers + 1) + (layers if "samplers" in part else int(at))
        after = "2" if (side, block) in attending else "1"
        within = {"attentions": "1", "upsamplers": after}.get(part, "0")
        outer = {"down": f"input_blocks.{number + 1}", "up": f"output_blocks.{number}"}
        own = {"resnets": _RESNET.get(inner, inner), "downsamplers": "op"}.get(part, inner)
        if side is not None:
            names[path] = f"{outer[side]}.{within}.{own}"
        elif place in _MIDDLE:
            names[path] = f"{_MIDDLE[place]}.{own}"
    return names


def _flat(name: str) -> str:
    return name.replace(".", "_")


def adaptable_layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers that LoRAs can change, by path."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def split_key(key: str) -> tuple[str, str]:
    """The layer's name and the tensor's; '' if the key has no known suffix."""
    plain = re.sub(r"\.default(?=\.weight$|$)", "", key)
    for pattern, name in _TENSORS_BY_PATTERN:
        if match := pattern.fullmatch(plain):
            return match[1], match.expand(name)
    return "", ""


def unsupported_kind(key: str) -> str | None:
    """The unsupported kind that a key belongs to, with its article, or None."""
    return next((kind for pattern, kind in _UNSUPPORTED_KINDS if pattern.fullmatch(key)), None)


#: The most characters of a tensor's name in a message.
_SHOWN_CHARACTERS = 200

#: Layouts that are kept, and the longest header of such a file.
_MAX_LAYOUTS = 64
_MAX_KEPT_CHARACTERS = 1024**2


class _UnfitError(Exception):
    """What does not fit the model."""


#: A tensor's name and place, and its stride and first number among those of its type; None where
#: it is not aligned.
_View = tuple[str, Place, tuple[tuple[int, ...], int] | None]


class Layout:
    """What the tensors of a file mean to a model."""

    def __init__(self, places: Mapping[str, Place], layers: Layers) -> None:
        """*places* by the tensors' names in the file."""
        self._places = places
        self._runs = list(_runs(places))
        by_layer = _by_layer(places, layers)
        compute = functools.cache(_compute_without_numbers)  # most layers are alike
        for (network, path), found in by_layer.items():
            weight = layers.shapes[network, path]
            try:
                compute(frozenset((name, place.shape) for name, place in found.items()), weight)
            except (ValueError, RuntimeError, IndexError) as error:
                tensors = ", ".join(f"{name} {list(place.shape)}" for name, place in found.items())
                raise _UnfitError(
                    f"for {network} {path}, of shape {list(weight)}, it has {tensors}"
                ) from error
        self._layers = {layer: list(map(_view, found.items())) for layer, found in by_layer.items()}

    def tensors(
        self, data: torch.Tensor
    ) -> Iterator[tuple[LayerId, dict[str, torch.Tensor], float | None]]:
        """Each layer's tensors as views of a file's *data*, but for its alpha, which is read."""
        self._check_numbers(data)
        numbers = {run.dtype: _as_numbers(data, run.dtype) for run in self._runs}
        for layer, found in self._layers.items():
            views = {
                name: numbers[place.dtype].as_strided(place.shape, *where)
                if where
                else place.of(data)
                for name, place, where in found
            }
            alpha = views.pop("alpha", None)
            yield layer, views, None if alpha is None else float(alpha)

    def _check_numbers(self, data: torch.Tensor) -> None:
        for run in self._runs:
            if not safetensors.is_finite(run.of(data)):
                for name, place in self._places.items():
                    if not safetensors.is_finite(place.of(data)):
                        raise _damaged(name)


def _damaged(key: str) -> UnusableError:
    return UnusableError(f"is damaged: {_short(key)} holds NaN, infinity or integers")


def _short(key: str) -> str:
    """A tensor's name for a message: whoever made the file may have made it megabytes long."""
    return repr(key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}...")


def _by_layer(places: Mapping[str, Place], layers: Layers) -> dict[LayerId, dict[str, Place]]:
    """Each layer's tensors by their names in a change."""
    by_layer: dict[LayerId, dict[str, Place]] = {}
    for key, place in places.items():
        if (known := layers.place(key)) is None:
            if kind := unsupported_kind(key):
                raise UnusableError(f"is {kind} ({_short(key)}), which is not supported")
            raise _UnfitError(f"unknown key {_short(key)}")
        if not place.dtype.is_floating_point:
            raise _damaged(key)
        layer, part = known
        if part in by_layer.setdefault(layer, {}):
            raise _UnfitError(f"it has {_short(key)} twice, under two names")
        by_layer[layer][part] = place
    return by_layer


def _compute_without_numbers(
    shapes: frozenset[tuple[str, tuple[int, ...]]], weight: torch.Size
) -> None:
    """Raises what `kinds.compute` does for tensors of these shapes that do not fit."""
    # On the meta device nothing is computed.
    tensors = {name: torch.empty((1, *shape), device="meta") for name, shape in shapes}
    if not kinds.is_known(frozenset(tensors)):
        raise ValueError("the tensors are of no known kind")
    if not all(tensor.numel() for tensor in tensors.values()):
        raise ValueError("a tensor is empty")
    if "alpha" in tensors and tensors["alpha"].numel() != 1:
        raise ValueError("alpha is not one number")
    kinds.compute(tensors, 1.0, torch.empty((1, *weight), device="meta"))


def _view(found: tuple[str, Place]) -> _View:
    name, place = found
    at, rest = divmod(place.begin, place.dtype.itemsize)
    stride = torch.empty(place.shape, device="meta").stride()
    return name, place, None if rest else (stride, at)


def _runs(places: Mapping[str, Place]) -> Iterator[Place]:
    """Tensors of one type that follow each other in the file, as one each."""
    in_order = sorted(places.values(), key=lambda place: (place.begin, place.end))
    run: list[Place] = []
    for place, following in itertools.zip_longest(in_order, in_order[1:]):
        run.append(place)
        if following is None or (following.dtype, following.begin) != (place.dtype, place.end):
            begin, end = run[0].begin, place.end
            yield Place(place.dtype, ((end - begin) // place.dtype.itemsize,), begin, end)
            run.clear()


def _as_numbers(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data[: len(data) - len(data) % dtype.itemsize].view(dtype)

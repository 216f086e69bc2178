"""Which layers a LoRA file's tensors change, by their keys; files of one program share a layout.

To place and check hundreds of tensors takes Python longer than to read them all, and Python does so
on one core only, which it shares with the engine's own thread.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from worker.engine.files import safetensors
from worker.engine.files.safetensors import Place, UnusableError
from worker.engine.lora import kinds
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


#: The most characters of a tensor's name in a message.
_SHOWN_CHARACTERS = 200

#: Layouts that are kept, and the longest header of such a file.
_MAX_LAYOUTS = 64
_MAX_KEPT_CHARACTERS = 1024**2


class _UnfitError(Exception):
    """What does not fit the model."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's tensors as views: name, type, size, stride and the first number's place."""

    views: Sequence[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]
    copies: Mapping[str, Place]
    """Places of tensors that are not aligned."""
    alpha: tuple[torch.dtype, int] | None
    """The place among all alphas of this type."""


class Layout:
    """What the tensors of a file mean to a model."""

    def __init__(self, places: Mapping[str, Place], layers: Layers) -> None:
        """*places* by the tensors' names in the file."""
        self._places = places
        self._runs = list(_runs(places))
        by_layer = _by_layer(places, layers)
        compute = functools.cache(_compute_without_numbers)  # most layers are alike
        for layer, found in by_layer.items():
            _check_shapes(layer, found, layers.shapes[layer], compute)
        alphas: dict[torch.dtype, list[int]] = {}
        self._layers = {layer: _as_views(found, alphas) for layer, found in by_layer.items()}
        self._alphas = {dtype: torch.tensor(at) for dtype, at in alphas.items()}

    def tensors(
        self, data: torch.Tensor
    ) -> Iterator[tuple[LayerId, dict[str, torch.Tensor], float | None]]:
        """Each layer's tensors as views of a file's *data*, but for its alpha, which is read."""
        self._check_numbers(data)
        numbers = {run.dtype: _as_numbers(data, run.dtype) for run in self._runs}
        alphas = {dtype: numbers[dtype][at].tolist() for dtype, at in self._alphas.items()}
        for layer, found in self._layers.items():
            views = {
                name: numbers[dtype].as_strided(size, stride, at)
                for name, dtype, size, stride, at in found.views
            }
            for name, place in found.copies.items():
                views[name] = place.of(data)
            alpha = None
            if "alpha" in views:
                alpha = float(views.pop("alpha").item())
            elif found.alpha is not None:
                dtype, number = found.alpha
                alpha = alphas[dtype][number]
            yield layer, views, alpha

    def _check_numbers(self, data: torch.Tensor) -> None:
        for run in self._runs:
            if not _is_finite(run.of(data)):
                for name, place in self._places.items():
                    if not _is_finite(place.of(data)):
                        raise _damaged(name)


class Layouts:
    """The layouts of a model's LoRA files; thread-safe."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self._found = functools.lru_cache(_MAX_LAYOUTS)(self._make)

    def find(self, content: safetensors.Content) -> Layout:
        """The layout of a file; for `safetensors.named`."""
        find = self._found if len(content.header) <= _MAX_KEPT_CHARACTERS else self._make
        try:
            return find(content.header, len(content.data))
        except _UnfitError as error:
            places = safetensors.places(content.header, len(content.data))
            shapes = {name: place.shape for name, place in places.items()}
            model = made_for(shapes, content.metadata)
            origin = f" (it was made for {model})" if model else ""
            raise UnusableError(f"does not fit this model{origin}: {error}") from error

    def _make(self, header: str, data_bytes: int) -> Layout:
        places = safetensors.places(header, data_bytes)
        if not places:
            raise UnusableError("holds no weights")
        return Layout(places, self.layers)


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


def _check_shapes(
    layer: LayerId,
    found: Mapping[str, Place],
    weight: torch.Size,
    compute: Callable[[frozenset[tuple[str, tuple[int, ...]]], torch.Size], None],
) -> None:
    try:
        compute(frozenset((name, place.shape) for name, place in found.items()), weight)
    except (ValueError, RuntimeError, IndexError) as error:
        network, path = layer
        tensors = ", ".join(f"{name} {list(place.shape)}" for name, place in found.items())
        raise _UnfitError(
            f"for {network} {path}, of shape {list(weight)}, it has {tensors}"
        ) from error


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


def _as_views(found: Mapping[str, Place], alphas: dict[torch.dtype, list[int]]) -> _Layer:
    """Adds the place of the layer's alpha to *alphas*."""
    views, copies, alpha = [], {}, None
    for name, place in found.items():
        at, rest = divmod(place.begin, place.dtype.itemsize)
        if rest:
            copies[name] = place
        elif name == "alpha":
            numbers = alphas.setdefault(place.dtype, [])
            alpha = (place.dtype, len(numbers))
            numbers.append(at)
        else:
            stride = torch.empty(place.shape, device="meta").stride()
            views.append((name, place.dtype, place.shape, stride, at))
    return _Layer(views, copies, alpha)


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


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch finds no extremes of 8-bit numbers
    # NaN counts as the smallest and as the largest.
    smallest, largest = torch.aminmax(tensor)
    return bool(smallest.isfinite()) and bool(largest.isfinite())

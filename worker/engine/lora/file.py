"""Reads LoRA files into one form, keyed by the model's own layer names, and checks them.

LoRA and LoCon (also in kohya's Tucker form), LoHa, LoKr and full differences, as LyCORIS and
kohya's scripts write them, each with or without DoRA's magnitudes. A file with anything that does
not fit is refused: leaving a change out would draw another image.

Files of one program share a layout, which is remembered: to place and check hundreds of tensors
takes Python longer than to read them all, and Python does so on one core only, which it shares with
the engine's own thread.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BaseModel, Field, FiniteFloat
from torch import nn

from imagefleet.files import contents
from imagefleet.files.safetensors import Header, Identity, identify
from imagefleet.telemetry import logs
from worker.engine import contract
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Place, ReadOnce, UnusableError
from worker.engine.lora import kinds
from worker.engine.lora.original_names import original_names

log = logs.EventLog(__name__)

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


class Layers:
    """The layers of a model that LoRAs can change, by every name that files use; thread-safe."""

    def __init__(self, unet: nn.Module, text_encoders: Mapping[Network, nn.Module]) -> None:
        self.shapes: dict[LayerId, torch.Size] = {}
        self._by_name: dict[str, LayerId] = {}
        self._layouts = functools.lru_cache(_MAX_LAYOUTS)(self._make)
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

    def find(self, name: str) -> LayerId | None:
        """The layer that a LoRA file calls *name*."""
        plain = name.removeprefix("base_model.model.").replace(".processor.", ".")
        return self._by_name.get(plain)


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
_SHOWN_OF_KEY = 200

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
    return repr(key if len(key) <= _SHOWN_OF_KEY else f"{key[:_SHOWN_OF_KEY]}...")


def _by_layer(places: Mapping[str, Place], layers: Layers) -> dict[LayerId, dict[str, Place]]:
    """Each layer's tensors by their names in a change."""
    by_layer: dict[LayerId, dict[str, Place]] = {}
    for key, place in places.items():
        if kind := unsupported_kind(key):
            raise UnusableError(f"is {kind} ({_short(key)}), which is not supported")
        name, part = split_key(key)
        if (layer := layers.find(name)) is None:
            raise _UnfitError(f"unknown key {_short(key)}")
        if not place.dtype.is_floating_point:
            raise _damaged(key)
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


Tensors = Mapping[str, torch.Tensor]

#: A key of peft's alpha_pattern: formally a regular expression, in practice a layer's name. Never
#: matched as an expression: a malicious one could block all threads for years.
_LayerName = Annotated[str, Field(pattern=r"^\^?[\w.]+$")]

#: The most characters of what is wrong with metadata.
_SHOWN_CHARACTERS = 300

#: Tensors whose first dimension is the rank; without any of them, alpha means nothing.
_RANKED = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """One layer's change: weight += strength * compute(weight).

    The tensors are on the CPU in the file's type; their names depend on the kind.
    """

    tensors: Tensors
    scale: float

    def compute(self, weight: torch.Tensor) -> torch.Tensor:
        """The change at strength 1 in float32, of the shape and device of the checkpoint's own."""
        stacked = {name: each.to(weight.device)[None] for name, each in self.tensors.items()}
        return kinds.compute(stacked, self.scale, weight[None])[0]

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing, at any strength."""
        if self.tensors.keys() & kinds.EXTRAS:
            return False  # DoRA's norms are a change of their own
        return self.scale == 0 or any(not tensor.any() for tensor in self.tensors.values())


def make_delta(tensors: Tensors, alpha: float | None, *, by_root: bool = False) -> WeightDelta:
    """The change that a layer's tensors describe, which `Layout` has checked.

    *by_root* divides alpha by the square root of the rank (rsLoRA), not by the rank.
    """
    rank = next((tensors[name].shape[0] for name in _RANKED if name in tensors), None)
    if alpha is None or rank is None:
        return WeightDelta(tensors, 1.0)
    return WeightDelta(tensors, alpha / (rank**0.5 if by_root else rank))


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA's weight changes, by network and layer path."""

    identity: Identity
    deltas: Mapping[Network, Mapping[str, WeightDelta]]
    size_bytes: int

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing."""
        return all(delta.is_zero for by_path in self.deltas.values() for delta in by_path.values())


class _PeftConfig(BaseModel):
    """A network's peft configuration: alphas, for which kohya's files have tensors."""

    lora_alpha: FiniteFloat | None = None
    alpha_pattern: dict[_LayerName, FiniteFloat] | None = None
    use_rslora: bool = False

    def alpha_of(self, path: str) -> float | None:
        """The alpha of the first pattern that is the path's end, or with ^ the whole path."""
        whole = (path, f"text_model.{path}")  # transformers 5.6 dropped the level
        for name, alpha in (self.alpha_pattern or {}).items():
            bare = name.removeprefix("^")
            if bare in whole or (bare == name and path.endswith(f".{name}")):
                return alpha
        return self.lora_alpha


def read_lora(path: Path, identity: Identity, layers: Layers) -> LoraFile:
    """Reads and checks one file; for `safetensors.named`."""
    deltas: dict[Network, dict[str, WeightDelta]] = {network: {} for network in get_args(Network)}
    content = safetensors.read(path, identity)
    configs = _peft_configs(content.metadata)
    for (network, layer), tensors, alpha in layers.layout_of(content).tensors(content.data):
        config = configs[network]
        strength = config.alpha_of(layer) if alpha is None else alpha
        deltas[network][layer] = make_delta(tensors, strength, by_root=config.use_rslora)
    return LoraFile(identity, deltas, content.data.nbytes)


def _peft_configs(metadata: Mapping[str, str]) -> dict[Network, _PeftConfig]:
    """Each network's peft configuration, which diffusers writes into the header."""
    try:
        stated: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        return {
            network: _PeftConfig.model_validate(
                {
                    key.removeprefix(f"{network}."): value
                    for key, value in stated.items()
                    if key.startswith(f"{network}.") or "." not in key
                }
            )
            for network in get_args(Network)
        }
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableError(f"has damaged metadata: {str(error)[:_SHOWN_CHARACTERS]}") from error


class LoraCache:
    """The LoRA files used last, for one model; thread-safe."""

    def __init__(self, layers: Layers, cache_bytes: int) -> None:
        self._layers = layers
        self._files = ReadOnce[LoraFile](cache_bytes, lambda file: file.size_bytes)
        self.lookups = self._files.lookups
        self._without_effect: set[Identity] = set()

    def get(self, lora: contract.Lora) -> LoraFile:
        """Reads a file, unless it is cached or another thread is reading it; raises as `named`."""
        with safetensors.named(f"the LoRA {lora.name!r}"):
            identity = lora.identity or identify(lora.path)
            return self._files.get(identity, lambda: self._read(lora, identity))

    def _read(self, lora: contract.Lora, identity: Identity) -> LoraFile:
        """Warns of a LoRA that changes nothing, once; its images are right."""
        file = read_lora(lora.path, identity, self._layers)
        if file.is_zero and identity not in self._without_effect:
            self._without_effect.add(identity)
            self.lookups["no_effect"] = len(self._without_effect)
            log.warning(
                f"the LoRA {lora.name!r} changes nothing: all its deltas are zero",
                action="lora_without_effect",
                lora=lora.name,
            )
        return file

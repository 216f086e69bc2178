"""Reads LoRA files into one form, keyed by the model's own layer names, and checks them.

The kinds are those of `imagefleet.files.lora`, which judges a file by itself. One with a change of
another shape than its layer's is refused: leaving it out would draw another image. What the model
has no layer for is skipped with a warning, as in AUTOMATIC1111.

Files of one program share a layout, which is remembered: to place and check hundreds of tensors
takes Python longer than to read them all, and Python does so on one core only, which it shares with
the engine's own thread.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.nn import Conv2d, GroupNorm, LayerNorm, Linear, Module, Parameter

from imagefleet.files import contents, lora
from imagefleet.files.safetensors import Identity, UnusableError, identify, parse
from imagefleet.job import differences
from imagefleet.telemetry.logs import log
from worker.engine.contract import Lora
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Content, Place, ReadOnce, Tensors
from worker.engine.lora import adapters, kinds
from worker.engine.lora.original_names import OriginalNames, unet_names

Network = Literal["unet", "transformer", "text_encoder", "text_encoder_2"]
Layer = Linear | Conv2d
#: A layer's network and its path there.
LayerId = tuple[Network, str]


class Layers:
    """The layers of a model that LoRAs can change, by every name that files use; thread-safe."""

    def __init__(
        self,
        unet: Module,
        text_encoders: Mapping[Network, Any],
        backbone: Network = "unet",
        names: OriginalNames = unet_names,
    ) -> None:
        """*backbone* is the name of the network that draws, with its layers' original *names*."""
        self.shapes: dict[LayerId, torch.Size] = {}
        #: The paths of the layers that one of an original name is, with the rows of all.
        self.members: dict[LayerId, tuple[str, ...]] = {}
        self._by_name: dict[str, LayerId] = {}
        self._layouts = functools.lru_cache(_MAX_LAYOUTS)(self._make)
        self.text_encoders = tuple(text_encoders)
        self.embedding_widths = sorted(
            each.get_input_embeddings().weight.shape[1]
            for each in text_encoders.values()
        )
        layers = self._weights(backbone, unet)
        dotted, underlined = _PREFIXES[backbone]
        for path in layers:
            short = path.removesuffix(".0")  # `to_out.0` was once `to_out`
            self._name(backbone, path, dotted, {path, short})
            self._name(backbone, path, underlined, {path})
        for original, members in names(layers).items():
            path = members[0]
            if len(members) > 1:
                path = "+".join(members)
                rows, *rest = self.shapes[backbone, members[0]]
                layer = backbone, path
                self.shapes[layer] = torch.Size((len(members) * rows, *rest))
                self.members[layer] = members
            self._name(backbone, path, _ORIGINAL_PREFIXES[backbone], {original})
            self._name(backbone, path, underlined, {original})
        for network, text_encoder in text_encoders.items():
            for path in self._weights(network, text_encoder):
                # transformers 5.6 dropped the level; files may have it.
                short = path.removeprefix("text_model.")
                old = re.sub(r"\b(?:([qkv])_proj|(out)_proj)$", r"to_\1\2", short)
                both = (
                    f"{short}.{old.rpartition('.')[2]}"  # of some versions of diffusers
                )
                spellings = {
                    level + name
                    for level in ("", "text_model.")
                    for name in (short, old, both)
                }
                self._name(network, path, _TEXT_PREFIXES[network], spellings)

    def _weights(self, network: Network, module: Module) -> list[str]:
        """Notes the shapes of a network's weights and biases; returns the paths of its layers."""
        found = adaptable(module)
        # SDXL's text projection is no layer of AUTOMATIC1111's: LoRAs do not change it there.
        found.pop("text_projection", None)
        self.shapes |= {(network, path): each.shape for path, each in found.items()}
        return [path for path in found if not path.endswith(".bias")]

    def _name(
        self, network: Network, path: str, prefixes: Sequence[str], names: Iterable[str]
    ) -> None:
        for prefix, name in itertools.product(prefixes, names):
            own = name.replace(".", "_") if prefix.endswith("_") else name
            self._by_name[prefix + own] = (network, path)

    def layout_of(self, content: Content) -> Layout:
        """The layout of a file, which those of one program share; for `safetensors.named`."""
        find = (
            self._layouts if len(content.header) <= _MAX_KEPT_CHARACTERS else self._make
        )
        try:
            return find(content.header, len(content.data))
        except _UnfitError as error:
            header = replace(parse(content.header), metadata=content.metadata)
            what = contents.identify(header).name
            raise UnusableError(
                f"does not fit this model (it is {what}): {error}"
            ) from error

    def _make(self, header: str, data_bytes: int) -> Layout:
        return Layout(safetensors.places(header, data_bytes), self)

    def find(self, name: str) -> LayerId | None:
        plain = name.removeprefix("base_model.model.").replace(".processor.", ".")
        return self._by_name.get(plain)


#: How names of the layers of networks that draw begin, with dots between a path's parts or without.
_PREFIXES: Mapping[Network, tuple[Sequence[str], Sequence[str]]] = {
    "unet": (("", "unet.", "lora_unet."), ("lora_unet_", "oft_unet_")),
    "transformer": (
        ("", "transformer.", "diffusion_model."),
        ("lora_unet_", "lora_transformer_", "lycoris_"),
    ),
}
_ORIGINAL_PREFIXES: Mapping[Network, Sequence[str]] = {
    "unet": ("diffusion_model.",),
    "transformer": ("", "diffusion_model.", "transformer."),
}

#: How names of the text encoders' layers begin; after an underscore they have no dots.
_TEXT_PREFIXES: Mapping[Network, Sequence[str]] = {
    "text_encoder": (
        "text_encoder.",
        "text_encoders.clip_l.transformer.",
        "lora_te_",
        "lora_te1_",  # the first of two has a number, too
        "lora_te_wrapped_transformer_",
    ),
    "text_encoder_2": (
        "text_encoder_2.",
        "text_encoders.clip_g.transformer.",
        "lora_te2_",
    ),
}


def adaptable_layers(network: Module) -> dict[str, Layer]:
    """The linear layers and convolutions, by path."""
    return {
        path: each for path, each in network.named_modules() if isinstance(each, Layer)
    }


def adaptable(network: Module) -> dict[str, Parameter]:
    """All that LoRAs can change, by path: of a layer's weight the layer's, then `.bias`."""
    return {
        f"{path}.{name}".removesuffix(".weight"): parameter
        for path, layer in network.named_modules()
        if isinstance(layer, Layer | GroupNorm | LayerNorm)
        for name, parameter in layer.named_parameters(recurse=False)
    }


#: Layouts that are kept, and the longest header of such a file.
_MAX_LAYOUTS = 64
_MAX_KEPT_CHARACTERS = 1024**2


class _UnfitError(Exception):
    """Raised for tensors that do not fit the model."""


class Layout:
    """Mapping of a file's tensors to a model's layers."""

    def __init__(self, places: Mapping[str, Place], layers: Layers) -> None:
        """*places* by the tensors' names in the file."""
        self.places = places
        self._dtypes = {place.dtype for place in places.values()}
        shapes = {key: place.shape for key, place in places.items()}
        integers = [
            key for key, place in places.items() if not place.dtype.is_floating_point
        ]
        found = lora.read(shapes, integers)
        #: True if layers have their modules' dotted names, as in diffusers and peft.
        self.is_dotted = any("." in name for name in found.layers)
        self.embeddings: dict[str, dict[str, str]] = {}
        #: The keys of what changes nothing.
        self.skipped = found.skipped
        for name, parts in found.embeddings.items():
            if (
                sorted(shapes[key][-1] for key in parts.values())
                == layers.embedding_widths
            ):
                self.embeddings[name] = parts
            else:
                self.skipped += parts.values()
        self._layers: dict[LayerId, Mapping[str, Place]] = {}
        self._padded: set[LayerId] = set()
        for name, parts in found.layers.items():
            self._place(name, parts, found.sizes[name], layers)
        if not (self._layers or self.embeddings):
            shown = next(iter(places))[: lora.SHOWN]
            raise _UnfitError(
                f"it changes no layer of the model's: unknown key {shown!r}"
            )

    def _place(
        self, name: str, parts: Mapping[str, str], size: tuple[int, int], layers: Layers
    ) -> None:
        """Notes what a layer's tensors change, whose change has this *size* (`lora.Contents`)."""
        tensors = {part: self.places[key] for part, key in parts.items()}
        if (layer := layers.find(name)) is None:
            # As AUTOMATIC1111 does, but never all that a LoRA changes of a network.
            if _IS_SECOND.match(name) and "text_encoder_2" not in layers.text_encoders:
                raise _UnfitError(
                    f"unknown key {next(iter(parts.values()))[: lora.SHOWN]!r}"
                )
            self.skipped += parts.values()
            return
        weight: Sequence[int] = layers.shapes[layer]
        inputs = next((tensors[part].shape for part in _PADDED if part in tensors), ())
        counts = (*weight[1:2], *inputs[1:2])
        if counts == _INPAINTING and len(inputs) == len(weight):
            self._padded.add(layer)
            weight = (weight[0], inputs[1], *weight[2:])
        bias = tensors.pop("bias", None)
        if _fits(size, tensors, weight):
            self._add(layer, tensors)
            if bias is not None and (layer[0], f"{layer[1]}.bias") in layers.shapes:
                self._add((layer[0], f"{layer[1]}.bias"), {"diff": bias})
            elif bias is not None:
                self.skipped.append(parts["bias"])
        elif counts == _INPAINTING[::-1]:
            self.skipped += parts.values()
        else:
            shown = ", ".join(
                f"{part} {list(each.shape)}" for part, each in tensors.items()
            )
            raise _UnfitError(
                f"for {' '.join(layer)}, of shape {list(weight)}, it has {shown}"
            )

    def _add(self, layer: LayerId, found: Mapping[str, Place]) -> None:
        if layer in self._layers:
            raise _UnfitError(f"it changes {' '.join(layer)} twice, under two names")
        self._layers[layer] = found

    def tensors(self, data: Tensor) -> Iterator[tuple[LayerId, dict[str, Tensor]]]:
        """Each layer's tensors as views of a file's *data*."""
        # All numbers at once where they are of one type, as in most files.
        is_sound = False
        if len(self._dtypes) == 1:
            (dtype,) = self._dtypes
            whole = len(data) - len(data) % dtype.itemsize
            is_sound = safetensors.is_finite(data[:whole].view(dtype))
        if not is_sound:
            _refuse_damaged(
                {name: place.of(data) for name, place in self.places.items()}
            )
        missing = _INPAINTING[0] - _INPAINTING[1]
        for layer, found in self._layers.items():
            tensors = {name: place.of(data) for name, place in found.items()}
            if layer in self._padded:
                for name in _PADDED & tensors.keys():
                    tensors[name] = F.pad(tensors[name], (0, 0, 0, 0, 0, missing))
            yield layer, tensors


def _refuse_damaged(tensors: Tensors) -> None:
    """Raises UnusableError in the words that the console has, too."""
    if (name := safetensors.find_damaged(tensors)) is not None:
        raise lora.damaged(name)


#: Inputs of the first layer of a model for inpainting, and of others: as AUTOMATIC1111 1.10, LoRAs
#: for the latter change the same ones of the former.
_INPAINTING = (9, 4)

#: Tensors that have the layer's inputs as their second dimension.
_PADDED = frozenset({"down", "diff"})

#: Names of layers of SDXL's second text encoder.
_IS_SECOND = re.compile(r"lora_te2_|text_encoder_2\.|text_encoders\.clip_g\.")


def _fits(
    size: tuple[int, int], parts: Mapping[str, Place], weight: Sequence[int]
) -> bool:
    """True if a delta of *size* (`lora.Contents.sizes`) fits a weight of this shape."""
    outputs = weight[0]
    inputs = math.prod(weight[1:])
    if "weight" in parts:
        return math.prod(parts["weight"].shape) in {outputs, inputs}
    if (scale := parts.get("dora_scale")) is not None:
        norms = outputs if scale.shape[0] == outputs else weight[1]
        if math.prod(scale.shape) != norms:
            return False
    inner = parts.get("up_a", parts.get("a2"))
    if inner is not None and inner.shape[0] != weight[1]:
        return False
    return size[0] == outputs and size[1] in {0, inputs}


#: Tensors whose first dimension is the rank; without any of them, alpha means nothing.
_RANKED = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b", "down_a")


@dataclass(frozen=True)
class WeightDelta:
    """One layer's change: weight += strength * compute(weight).

    The tensors are on the CPU in the file's type; their names depend on the kind.
    """

    tensors: Tensors
    scale: float

    def compute(self, weight: Tensor) -> Tensor:
        """The change at strength 1 in float32, of the shape and device of the checkpoint's own."""
        stacked = {
            name: each.to(weight.device)[None] for name, each in self.tensors.items()
        }
        return kinds.compute(stacked, self.scale, weight[None])[0]


def make_delta(
    tensors: Tensors, alpha: float | None, *, by_root: bool = False
) -> WeightDelta:
    """The change that a layer's tensors describe, which `Layout` has checked.

    *by_root* divides alpha by the square root of the rank (rsLoRA), not by the rank. As in
    AUTOMATIC1111 1.10, a scale of the file's own goes before alpha, which limits an OFT's turns.
    """
    own = dict(tensors)
    scale = own.pop("scale", None)
    on_input = own.pop("on_input", None)
    if on_input is not None:
        shape = (1, -1) if on_input.item() else (-1, 1)
        own["weight"] = own["weight"].reshape(shape)
    rank = next((own[name].shape[0] for name in _RANKED if name in own), None)
    factor = 1.0
    if (blocks := own.get("oft_blocks")) is not None:
        if alpha:
            count, size, *_ = blocks.shape
            own["limit"] = torch.tensor(alpha * count * size)
    elif scale is not None:
        factor = float(scale)
    elif alpha is not None and rank is not None:
        factor = alpha / (rank**0.5 if by_root else rank)
    return WeightDelta(own, factor)


def split_rows(
    delta: WeightDelta, parts: int, shape: Sequence[int]
) -> list[WeightDelta]:
    """The change of several layers of one shape, whose rows a file has as one layer's of *shape*.

    Raises UnusableError for kinds whose change of some rows depends on the others.
    """
    tensors = delta.tensors
    rowed = tensors.keys() & (kinds.ROWS | lora.NORMS)
    divides = all(len(tensors[name]) % parts == 0 for name in rowed)
    of_weights = tensors.keys() & kinds.OF_WEIGHTS
    if not (rowed and divides) and not of_weights:
        # Kronecker's blocks of rows, say, do not end where a layer does.
        whole = delta.compute(torch.empty(*shape))
        return [WeightDelta({"diff": each}, 1.0) for each in whole.chunk(parts)]
    if not (rowed and divides) or of_weights - lora.NORMS:
        raise UnusableError(
            "does not fit this model: queries, keys and values are one layer in it, which is"
            " changed by a kind that cannot be taken apart"
        )
    return [
        WeightDelta(
            {
                name: each.chunk(parts)[part] if name in rowed else each
                for name, each in tensors.items()
            },
            delta.scale,
        )
        for part in range(parts)
    ]


@dataclass(frozen=True)
class LoraFile:
    """A LoRA's weight changes, by network and layer path."""

    identity: Identity
    deltas: Mapping[Network, Mapping[str, WeightDelta]]
    size_bytes: int
    #: The tensors of the textual inversions that come with it, by their names.
    embeddings: Mapping[str, Tensors] = field(default_factory=dict)
    #: The keys of what changes nothing of this model.
    skipped: Sequence[str] = ()
    #: See `Layout`.
    is_dotted: bool = False

    @property
    def depends_on_weights(self) -> bool:
        """True if its deltas depend on the weights that they change."""
        return any(
            delta.tensors.keys() & kinds.OF_WEIGHTS
            for deltas in self.deltas.values()
            for delta in deltas.values()
        )


def _no_deltas() -> dict[Network, dict[str, WeightDelta]]:
    return {network: {} for network in get_args(Network)}


def read_lora(path: Path, identity: Identity, layers: Layers) -> LoraFile:
    """Reads and checks one file; for `safetensors.named`."""
    deltas = _no_deltas()
    content = safetensors.read(path, identity)
    configs = lora.peft_configs(content.metadata)
    if lora.peft_type(configs) is not None:
        return _read_adapter(content, identity, configs, layers)
    layout = layers.layout_of(content)
    for (network, layer), tensors in layout.tensors(content.data):
        on_input = tensors.get("on_input")
        if on_input is not None:  # its shapes do not tell which side it scales
            weight = layers.shapes[network, layer]
            scaled = weight[1:] if on_input.item() else weight[:1]
            if tensors["weight"].numel() != math.prod(scaled):
                raise UnusableError(
                    f"does not fit this model: it scales {network} {layer}"
                )
        config = configs[network]
        alpha = tensors.pop("alpha", None)
        strength = config.alpha_of(layer) if alpha is None else float(alpha)
        delta = make_delta(tensors, strength, by_root=config.use_rslora)
        members = layers.members.get((network, layer))
        parts = [delta]
        if members is not None:
            whole = layers.shapes[network, layer]
            parts = split_rows(delta, len(members), whole)
        for own, part in zip(members or (layer,), parts, strict=True):
            if own in deltas[network]:
                raise UnusableError(
                    f"changes {network} {own} twice, by itself and with others"
                )
            deltas[network][own] = part
    embeddings = {
        name: {part: layout.places[key].of(content.data) for part, key in parts.items()}
        for name, parts in layout.embeddings.items()
    }
    return LoraFile(
        identity,
        deltas,
        content.data.nbytes,
        embeddings,
        layout.skipped,
        layout.is_dotted,
    )


def _read_adapter(
    content: Content,
    identity: Identity,
    configs: Mapping[str, lora.PeftConfig],
    layers: Layers,
) -> LoraFile:
    """Reads what only peft computes, as whole changes of the layers' weights."""
    places = safetensors.places(content.header, len(content.data))
    tensors = {key: place.of(content.data) for key, place in places.items()}
    _refuse_damaged(tensors)
    deltas = _no_deltas()
    skipped = []
    size_bytes = 0
    for network, own in deltas.items():
        adapted = {}
        found = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(f"{network}.")
            if name == key:
                continue
            if name.startswith(lora.PEFT_PREFIX):  # of all layers
                adapted[name] = tensor
            elif (layer := _layer_of(network, name, layers)) is None:
                skipped.append(key)
            else:
                found[layer[0]] = layer[1]
                adapted[f"{lora.PEFT_LAYER_PREFIX}{name}"] = tensor
        if not found:
            continue
        shapes = {name: layers.shapes[layer] for name, layer in found.items()}
        for name, parts in adapters.read(configs[network], adapted, shapes).items():
            own[found[name][1]] = WeightDelta(parts, 1.0)
            size_bytes += sum(part.nbytes for part in parts.values())
    if not any(deltas.values()):
        raise UnusableError(
            "does not fit this model: it changes no layer of the model's"
        )
    return LoraFile(identity, deltas, size_bytes, skipped=skipped)


def _layer_of(
    network: Network, name: str, layers: Layers
) -> tuple[str, LayerId] | None:
    """The layer that a tensor's name begins with: its name there, and the model's."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        layer = ".".join(parts[:count])
        if (found := layers.find(f"{network}.{layer}")) is not None:
            return layer, found
    return None


class LoraCache:
    """The LoRA files used last, for one model; thread-safe."""

    def __init__(self, layers: Layers, cache_bytes: int) -> None:
        self._layers = layers
        self._files = ReadOnce[LoraFile](cache_bytes, lambda file: file.size_bytes)
        self.lookups = self._files.lookups
        self._told: set[Identity] = set()

    def get(self, named: Lora) -> LoraFile:
        """Reads a file, unless it is cached or another thread is reading it; raises as `named`."""
        with safetensors.named(f"the LoRA {named.name!r}"):
            identity = named.identity or identify(named.path)
            return self._files.get(identity, lambda: self._read(named, identity))

    def _read(self, named: Lora, identity: Identity) -> LoraFile:
        """Warns once of a LoRA that changes less than it has, or is drawn otherwise elsewhere."""
        file = read_lora(named.path, identity, self._layers)
        if identity in self._told:
            return file
        self._told.add(identity)
        if file.skipped:
            log.warning(
                f"the LoRA {named.name!r} is drawn without {len(file.skipped):,} of its tensors,"
                f" which change nothing here, such as {file.skipped[0][: lora.SHOWN]!r}",
                action="lora_tensors_skipped",
                lora=named.name,
            )
        if file.is_dotted:
            differences.warn("dotted_lora")
        return file

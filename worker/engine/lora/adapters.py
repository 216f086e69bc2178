"""Reads adapters in peft's own format, of any kind, by what peft's own layers make of weights.

A kind is a map of a layer's weight: W' = diag(s) W R + D. VeRA, FourierFT, MiSS and others add D;
OFT, BOFT, HRA and IA3 multiply. The parts are read off what peft's layer makes of a few weights,
and held against what it computes with others: a kind that is no such map, or depends on the
checkpoint's own weights, is refused.
"""

import dataclasses
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Conv2d, Linear, Module, Parameter

from imagefleet.files import lora
from imagefleet.files.lora import PeftConfig
from imagefleet.files.safetensors import UnusableError
from worker.engine.files.safetensors import Tensors
from worker.engine.lora import kinds

#: The most memory that an adapter's whole differences take.
MAX_BYTES = 2**30

#: The highest rank and other sizes of a configuration: peft allocates before it compares.
_MAX_RANK = 1024
_MAX_SIZE = 2**20

#: How far a layer's outputs may be from those of its parts, relative to the largest of them.
_TOLERANCE = 1e-4

#: Rows of random inputs with which a layer is held against its parts.
_TRIALS = 16

#: Fields of a configuration that say which layers are adapted, which the tensors do, or what peft
#: loads besides.
_NOT_TAKEN = re.compile(
    r"(base_model|auto_mapping|revision|task_type|peft_|runtime|inference|megatron|exclude|layers_"
    r"|layer_replication|target_parameters|modules_to_save|trainable_token).*|.*_config"
)

#: Text of a configuration: peft takes some of it as regular expressions.
_NAME = re.compile(r"[\w.-]{0,200}")

#: Each layer's parts, as `kinds.compute` takes them, by its name.
Adapted = Mapping[str, Tensors]


def read(
    config: PeftConfig,
    tensors: Tensors,
    shapes: Mapping[str, torch.Size],
) -> Adapted:
    """Reads one network's *tensors*, which have peft's names, for weights of these *shapes*.

    Takes seconds: peft's layers are built, twice, and asked a few questions each. Raises
    UnusableError.
    """
    kind = config.peft_type
    try:
        first, second = (_PeftLayers(config, tensors, shapes, seed) for seed in (0, 1))
        found = {}
        size_bytes = 0
        for name in shapes:
            found[name] = parts = first.parts_of(name)
            size_bytes += sum(part.nbytes for part in parts.values())
            if size_bytes > MAX_BYTES:
                raise UnusableError(
                    f"would take over {MAX_BYTES >> 20:,} MiB: {kind} is merged as whole"
                    " differences"
                )
            if not second.follows(name, parts):
                raise UnusableError(
                    f"cannot be merged: for {name!r}, {kind} changes more than the layer's weight,"
                    " or depends on the checkpoint's"
                )
    except (
        AttributeError,
        ImportError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UnusableError(
            f"cannot be read by peft as a {kind} adapter: {str(error)[:300]}"
        ) from error
    return found


class _PeftLayers:
    """peft's layers of an adapter, on random weights."""

    def __init__(
        self,
        config: PeftConfig,
        tensors: Tensors,
        shapes: Mapping[str, torch.Size],
        seed: int,
    ) -> None:
        import peft  # it takes seconds, and few files need it

        self._generator = torch.Generator().manual_seed(seed)
        network = Module()
        for name, shape in shapes.items():
            *parents, own = name.split(".")
            parent = network
            for part in parents:
                if not hasattr(parent, part):
                    parent.add_module(part, Module())
                parent = parent.get_submodule(part)
            outputs, inputs, *kernel = shape
            layer: Linear | Conv2d = Linear(inputs, outputs, device="meta")
            if kernel:
                layer = Conv2d(inputs, outputs, kernel[0], device="meta")
            layer.weight = Parameter(self._random(shape), requires_grad=False)
            layer.bias = Parameter(torch.zeros(outputs), requires_grad=False)
            parent.add_module(own, layer)
        # peft draws what the adapter replaces, and what a seed of its own decides.
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(network, _peft_config(config, list(shapes)))
            loaded = peft.set_peft_model_state_dict(model, dict(tensors))
        if loaded.unexpected_keys:
            raise ValueError(f"unknown key {loaded.unexpected_keys[0][: lora.SHOWN]!r}")
        model.eval().requires_grad_(requires_grad=False)
        self._layers = {name: network.get_submodule(name) for name in shapes}

    def _random(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    @torch.no_grad()
    def parts_of(self, name: str) -> dict[str, Tensor]:
        """D as `diff`, R as `turn` [inputs, inputs] and s as `turn_scale` [outputs]."""
        layer: Any = self._layers[name]
        shape = layer.get_base_layer().weight.shape
        added = _merged(layer, torch.zeros(shape))
        weight = self._random(shape)
        if torch.allclose(_merged(layer, weight), weight + added, atol=1e-5):
            return {"diff": added}
        outputs = shape[0]
        inputs = shape[1:].numel()
        # Rows that are equal show what scales the outputs, those of an identity what turns inputs.
        equal = torch.zeros(outputs, inputs)
        equal[:, 0] = 1
        rows = (_merged(layer, equal.view(shape)) - added).flatten(1).double()
        scales = rows @ rows[0] / (rows[0] @ rows[0])
        turn = torch.empty(inputs, inputs)
        for begin in range(0, inputs, outputs):
            count = min(outputs, inputs - begin)
            identity = torch.zeros(outputs, inputs)
            identity[:count, begin : begin + count] = torch.eye(count)
            rows = (_merged(layer, identity.view(shape)) - added).flatten(1).double()
            turned = rows[:count] / scales[:count, None]
            turn[begin : begin + count] = turned
        parts = {"turn": turn, "turn_scale": scales.float()}
        return parts | ({"diff": added} if added.any() else {})

    @torch.no_grad()
    def follows(self, name: str, parts: Tensors) -> bool:
        """True if the layer computes, unmerged, what its weight does with these *parts*."""
        layer: Any = self._layers[name]
        base = layer.get_base_layer()
        weight = self._random(base.weight.shape)
        inputs = self._random(torch.Size((_TRIALS, *weight.shape[1:])))
        base.weight.data = weight.clone()
        found = layer(inputs)
        stacked = {part: tensor[None] for part, tensor in parts.items()}
        base.weight.data = weight + kinds.compute(stacked, 1.0, weight[None])[0]
        expected = base(inputs)
        most = _TOLERANCE * expected.abs().max()
        return bool((found - expected).abs().max() <= most)


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """Merges the adapter of peft's layer into *weight*."""
    base = layer.get_base_layer()
    base.weight.data = weight.clone()
    layer.merge()
    layer.merged_adapters.clear()
    merged: Tensor = base.weight.data
    return merged.float()


def _peft_config(config: PeftConfig, names: list[str]) -> Any:
    """The configuration as peft's own class; raises UnusableError for what is not taken."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    cls = PEFT_TYPE_TO_CONFIG_MAPPING.get(config.peft_type.upper())
    if cls is None:
        raise UnusableError(
            f"is a {config.peft_type[:60]!r} adapter, which the peft that is installed here does"
            " not know"
        )
    known = {field.name for field in dataclasses.fields(cls)}
    stated = {
        key: value
        for key, value in config.model_dump(exclude_unset=True).items()
        if key in known and not _NOT_TAKEN.fullmatch(key)
    }
    for key, value in stated.items():
        _check(key, value)
    targets = stated.get("target_modules")
    stated["target_modules"] = targets if isinstance(targets, list) else names
    return cls(**stated)


def _check(key: str, value: object) -> None:
    """Raises UnusableError for a value that peft should not be given of a stranger."""
    inner = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    most = _MAX_RANK if key in {"r", "rank_pattern"} else _MAX_SIZE
    for item in inner:
        if isinstance(item, str):
            is_taken = key == "target_modules" or _NAME.fullmatch(item) is not None
        elif isinstance(item, bool | int | float):
            is_taken = abs(item) <= most
        else:
            is_taken = item is None
        if not is_taken:
            raise UnusableError(f"has a configuration with {key} {str(item)[:60]!r}")

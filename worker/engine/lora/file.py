"""Reads LoRA files into one form, keyed by the model's own layer names, and checks them.

A file with anything that does not fit is refused: leaving a change out would draw another image.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from imagefleet import errors
from worker.engine import contract
from worker.engine.lora.formats import WeightDelta, make_delta
from worker.engine.lora.names import (
    LayerId,
    Layers,
    Network,
    made_for,
    split_key,
    unsupported_kind,
)

Identity = tuple[str, int, int]
"""Path, modification time in ns and size in bytes: a replaced file is another file."""


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA's weight changes, by network and layer path."""

    identity: Identity
    deltas: Mapping[Network, Mapping[str, WeightDelta]]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _PeftConfig:
    """A network's peft configuration: alphas, for which kohya's files have tensors."""

    alpha: float | None
    alphas: Mapping[str, float]
    by_root: bool

    def alpha_of(self, path: str) -> float | None:
        """The alpha of the first pattern that is the path's end, or with ^ the whole path."""
        whole = (path, f"text_model.{path}")  # transformers 5.6 dropped the level
        for name, alpha in self.alphas.items():
            bare = name.removeprefix("^")
            if bare in whole or (bare == name and path.endswith(f".{name}")):
                return alpha
        return self.alpha


def identify(lora: contract.Lora) -> Identity:
    """Identifies the file's content.

    Raises:
        TransientError: it cannot be read, or was evicted from the disk meanwhile.
    """
    try:
        status = lora.path.stat()
    except OSError as error:
        raise _unreadable(lora, error) from error
    return (str(lora.path), status.st_mtime_ns, status.st_size)


def read_lora(lora: contract.Lora, identity: Identity, layers: Layers) -> LoraFile:
    """Reads and checks one file.

    Raises:
        UnusableFileError: it is not a LoRA, or not one for this model; names the file.
        TransientError: it could not be read.
    """
    tensors, metadata = _read_tensors(lora)
    configs = _peft_configs(lora, metadata)
    by_layer: dict[LayerId, dict[str, torch.Tensor]] = {}
    for key, tensor in sorted(tensors.items()):  # safetensors' order changes with each reading
        if kind := unsupported_kind(key):
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} is {kind} ({key!r}), which is not supported"
            )
        split = split_key(key)
        layer = layers.find(split[0]) if split else None
        if split is None or layer is None:
            raise _unfit(lora, tensors, metadata, f"unknown key {key!r}")
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} is damaged: {key!r} holds NaN, infinity or integers"
            )
        if split[1] in by_layer.setdefault(layer, {}):
            raise _unfit(lora, tensors, metadata, f"it has {key!r} twice, under two names")
        by_layer[layer][split[1]] = tensor
    deltas: dict[Network, dict[str, WeightDelta]] = {network: {} for network in get_args(Network)}
    for (network, path), found in by_layer.items():
        config, shape = configs[network], layers.shapes[network, path]
        try:
            delta = make_delta(found, config.alpha_of(path), by_root=config.by_root)
            # On the meta device, which checks the shapes and computes nothing.
            delta.compute(torch.empty(shape, device="meta"))
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in found.items())
            reason = f"for {network} {path}, of shape {list(shape)}, it has {shapes}"
            raise _unfit(lora, tensors, metadata, reason) from error
        deltas[network][path] = delta
    return LoraFile(identity, deltas, sum(tensor.nbytes for tensor in tensors.values()))


def _unfit(
    lora: contract.Lora,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    reason: str,
) -> errors.UnusableFileError:
    model = made_for({key: tensor.shape for key, tensor in tensors.items()}, metadata)
    origin = f" (it was made for {model})" if model else ""
    return errors.UnusableFileError(
        f"the LoRA {lora.name!r} does not fit this model{origin}: {reason}"
    )


def _unreadable(lora: contract.Lora, error: OSError) -> errors.TransientError:
    return errors.TransientError(
        f"the LoRA {lora.name!r} cannot be read: {error.strerror or error}"
    )


def _read_tensors(lora: contract.Lora) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The file's tensors and the metadata of its header.

    Read, not mapped: a mapped file that is truncated meanwhile kills the process.
    """
    try:
        content = lora.path.read_bytes()
        tensors = load(content)
    except OSError as error:
        raise _unreadable(lora, error) from error
    except SafetensorError as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} is not a complete .safetensors file: {error}"
        ) from error
    except KeyError as error:  # a number type that safetensors has and torch lacks
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} holds numbers of the type {error}, which is not supported"
        ) from error
    if not tensors:
        raise errors.UnusableFileError(f"the LoRA {lora.name!r} holds no weights")
    (header_bytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_bytes])
    return tensors, header.get("__metadata__") or {}


def _peft_configs(lora: contract.Lora, metadata: Mapping[str, str]) -> dict[Network, _PeftConfig]:
    """Each network's peft configuration, which diffusers writes into the header."""
    configs: dict[Network, _PeftConfig] = {}
    try:
        stated: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        for network in get_args(Network):
            own = {
                key.removeprefix(f"{network}."): value
                for key, value in stated.items()
                if key.startswith(f"{network}.") or "." not in key
            }
            alpha = own.get("lora_alpha")
            configs[network] = _PeftConfig(
                alpha=None if alpha is None else _finite(alpha),
                alphas={
                    _layer_name(name): _finite(each)
                    for name, each in (own.get("alpha_pattern") or {}).items()
                },
                by_root=bool(own.get("use_rslora")),
            )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} has damaged metadata: {error}"
        ) from error
    return configs


def _finite(alpha: Any) -> float:
    if not math.isfinite(number := float(alpha)):
        raise ValueError(f"{alpha!r} is not a valid alpha")
    return number


def _layer_name(pattern: str) -> str:
    """A key of peft's alpha_pattern: formally a regular expression, in practice a layer's name.

    Never matched as an expression: a malicious one could block all threads for years.
    """
    if not re.fullmatch(r"\^?[\w.]+", pattern):
        raise ValueError(f"{pattern[:80]!r} in its alpha_pattern is not a layer's name")
    return pattern

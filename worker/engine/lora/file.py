"""Reads LoRA files into one form, keyed by the model's own layer names, and checks all of it.

Whatever does not fit is refused by the LoRA's name: a change left out is another picture.
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
from worker.engine.lora.formats import WeightDelta, make_change
from worker.engine.lora.names import Layers, Network, Place, made_for, split_key, unsupported_kind

Identity = tuple[str, int, int]
"""Path, modification time and size: a file that was replaced is another file."""


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA, ready to be applied: its changes by the names of the layers they change."""

    identity: Identity
    changes: Mapping[Network, Mapping[str, WeightDelta]]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _PeftConfig:
    """What peft keeps beside a network's weights; alphas where kohya's files have tensors."""

    alpha: float | None
    alphas: Mapping[str, float]
    by_root: bool

    def alpha_of(self, path: str) -> float | None:
        """That of the first name which the layer's path ends with, or is where it begins with ^."""
        whole = (path, f"text_model.{path}")  # transformers 5.6 dropped the level
        for name, alpha in self.alphas.items():
            bare = name.removeprefix("^")
            if bare in whole or (bare == name and path.endswith(f".{name}")):
                return alpha
        return self.alpha


def identify(lora: contract.Lora) -> Identity:
    """What tells this file from another one in its place.

    Raises:
        TransientError: it cannot be read, or is not there (any more: it was when its name was
        looked up).
    """
    try:
        status = lora.path.stat()
    except OSError as error:
        raise _unreadable(lora, error) from error
    return (str(lora.path), status.st_mtime_ns, status.st_size)


def read_lora(lora: contract.Lora, identity: Identity, layers: Layers) -> LoraFile:
    """Reads and checks one file.

    Raises:
        UnusableFileError: it is no LoRA, or none for this model; names the file.
        TransientError: it could not be read.
    """
    tensors, metadata = _read_tensors(lora)
    configs = _peft_configs(lora, metadata)
    parts: dict[Place, dict[str, torch.Tensor]] = {}
    for key, tensor in sorted(tensors.items()):  # the file's own order changes with each reading
        if kind := unsupported_kind(key):
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} is {kind} ({key!r}), which is not supported"
            )
        split = split_key(key)
        place = layers.find(split[0]) if split else None
        if split is None or place is None:
            raise _unfit(lora, tensors, metadata, f"nothing here answers to its {key!r}")
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise errors.UnusableFileError(
                f"the LoRA {lora.name!r} is damaged: {key!r} holds NaN, infinity or no numbers"
            )
        if split[1] in parts.setdefault(place, {}):
            raise _unfit(lora, tensors, metadata, f"it has {key!r} under another name, too")
        parts[place][split[1]] = tensor
    changes: dict[Network, dict[str, WeightDelta]] = {network: {} for network in get_args(Network)}
    for (network, path), found in parts.items():
        config, shape = configs[network], layers.shapes[network, path]
        try:
            change = make_change(found, config.alpha_of(path), by_root=config.by_root)
            # Worked out on shapes alone: where that succeeds, it does so with the numbers, too.
            change.delta(torch.empty(shape, device="meta"))
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in found.items())
            reason = f"for {network} {path}, of shape {list(shape)}, it has {shapes}"
            raise _unfit(lora, tensors, metadata, reason) from error
        changes[network][path] = change
    return LoraFile(identity, changes, sum(tensor.nbytes for tensor in tensors.values()))


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
    """The file's tensors and the texts of its header.

    Read whole, not mapped: a file that is cut short while it is mapped kills the process.
    """
    try:
        content = lora.path.read_bytes()
        tensors = load(content)
    except OSError as error:
        raise _unreadable(lora, error) from error
    except SafetensorError as error:
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} is no complete .safetensors file: {error}"
        ) from error
    except KeyError as error:  # a type of numbers that safetensors knows and torch has not
        raise errors.UnusableFileError(
            f"the LoRA {lora.name!r} holds numbers of the type {error}, which is not supported"
        ) from error
    if not tensors:
        raise errors.UnusableFileError(f"the LoRA {lora.name!r} holds no weights")
    (header_bytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_bytes])
    return tensors, header.get("__metadata__") or {}


def _peft_configs(lora: contract.Lora, metadata: Mapping[str, str]) -> dict[Network, _PeftConfig]:
    """Each network's configuration of peft: diffusers keeps it in the header."""
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
        raise ValueError(f"{alpha!r} is no alpha")
    return number


def _layer_name(pattern: str) -> str:
    """A key of peft's alpha_pattern: a regular expression there, in practice a layer's name.

    Matched as one, it could be written to take years, with all other threads waiting.
    """
    if not re.fullmatch(r"\^?[\w.]+", pattern):
        raise ValueError(f"{pattern[:80]!r} in its alpha_pattern is no layer's name")
    return pattern

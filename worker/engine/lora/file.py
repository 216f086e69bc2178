"""Reads LoRA files into one form, keyed by the model's own layer names, and checks them.

LoRA and LoCon (also in kohya's Tucker form), LoHa, LoKr and full differences, as LyCORIS and
kohya's scripts write them, each with or without DoRA's magnitudes. A file with anything that does
not fit is refused: leaving a change out would draw another image.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
from pydantic import BaseModel, Field, FiniteFloat

from worker.engine import contract
from worker.engine.files import safetensors
from worker.engine.files.safetensors import Identity, ReadOnce, UnusableError
from worker.engine.lora import kinds, layout
from worker.engine.lora.layout import Network

log = logging.getLogger(__name__)

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


def read_lora(path: Path, identity: Identity, layers: layout.Layers) -> LoraFile:
    """Reads and checks one file; for `safetensors.named`."""
    deltas: dict[Network, dict[str, WeightDelta]] = {network: {} for network in get_args(Network)}
    content = safetensors.read(path)
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

    def __init__(self, layers: layout.Layers, cache_bytes: int) -> None:
        self._layers = layers
        self._files = ReadOnce[LoraFile](cache_bytes, lambda file: file.size_bytes)
        self.lookups = self._files.lookups
        self._without_effect: set[Identity] = set()

    def get(self, lora: contract.Lora) -> LoraFile:
        """Reads a file, unless it is cached or another thread is reading it; raises as `named`."""
        with safetensors.named(f"the LoRA {lora.name!r}"):
            identity = safetensors.identify(lora.path)
            return self._files.get(identity, lambda: self._read(lora, identity))

    def _read(self, lora: contract.Lora, identity: Identity) -> LoraFile:
        """Warns of a LoRA that changes nothing, once; its images are right."""
        file = read_lora(lora.path, identity, self._layers)
        if file.is_zero and identity not in self._without_effect:
            self._without_effect.add(identity)
            self.lookups["no_effect"] = len(self._without_effect)
            log.warning(
                "the LoRA %r changes nothing: all its deltas are zero",
                lora.name,
                extra={"action": "lora_without_effect", "lora": lora.name},
            )
        return file

"""LoRAs on the model, through peft: loaded beside the weights, switched on and off, never fused.

Fusing and taking out again leaves rounding errors behind; a switched-off adapter leaves none.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from worker.engine.lora_file import Delta, Identity, LoraFile, Network

#: Kept on the GPU beside the model: some 40 files of rank 32. Loading one takes about 0.1 s, but
#: on a card of 8 GB a batch needs the memory, too.
_MAX_LOADED_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class Applied:
    """A LoRA and how strongly it changes each network."""

    file: LoraFile
    weights: Mapping[Network, float]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.file.identity, *sorted(self.weights.items()))


class Adapters:
    """The LoRAs loaded into one model; used by the GPU's thread alone."""

    def __init__(self, unet: nn.Module, text_encoder: nn.Module) -> None:
        self._networks: dict[Network, nn.Module] = {"unet": unet, "text_encoder": text_encoder}
        self._loaded: OrderedDict[Identity, str] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._names = 0

    def activate(self, loras: Sequence[Applied]) -> None:
        """Makes the model the base model plus just these LoRAs; without any, exactly the base."""
        for applied in loras:
            self._load(applied.file)
        for network, module in self._networks.items():
            for path, layer in _lora_layers(module).items():
                active = []
                for applied in loras:
                    delta, weight = applied.file.deltas[network].get(path), applied.weights[network]
                    if delta is not None and weight:
                        name = self._loaded[applied.file.identity]
                        layer.scaling[name] = weight * delta.scale
                        active.append(name)
                layer.set_adapter(active)
                layer.enable_adapters(enabled=bool(active))
        self._evict(in_use=len(loras))

    def _load(self, file: LoraFile) -> None:
        if file.identity in self._loaded:
            self._loaded.move_to_end(file.identity)
            return
        self._names += 1
        name = f"lora{self._names}"
        try:
            for network, deltas in file.deltas.items():
                if deltas:
                    _inject(self._networks[network], name, deltas)
        except BaseException:
            self._delete(name)
            raise
        self._loaded[file.identity] = name
        self._bytes[name] = file.size_bytes

    def _evict(self, in_use: int) -> None:
        while len(self._loaded) > in_use and sum(self._bytes.values()) > _MAX_LOADED_BYTES:
            _, name = self._loaded.popitem(last=False)
            self._delete(name)
            del self._bytes[name]

    def _delete(self, name: str) -> None:
        for module in self._networks.values():
            for layer in _lora_layers(module).values():
                # peft warns when it has to choose another adapter in place of an active one.
                layer.set_adapter([other for other in layer.active_adapters if other != name])
                layer.delete_adapter(name)


def _inject(network: nn.Module, name: str, deltas: Mapping[str, Delta]) -> None:
    reference = next(network.parameters())
    rank = max(delta.rank for delta in deltas.values())
    config = LoraConfig(
        r=rank,
        target_modules=list(deltas),
        rank_pattern={
            re.escape(path): delta.rank for path, delta in deltas.items() if delta.rank != rank
        },
    )
    weights: dict[str, torch.Tensor] = {}
    for path, delta in deltas.items():
        weights[f"{path}.lora_A.weight"] = delta.down.to(reference)
        weights[f"{path}.lora_B.weight"] = delta.up.to(reference)
    # peft warns of adapters that it did not expect; here they are expected, and kept account of.
    vars(network).pop("peft_config", None)
    inject_adapter_in_model(config, network, name, low_cpu_mem_usage=True, state_dict=weights)
    result = set_peft_model_state_dict(network, weights, name, low_cpu_mem_usage=True)
    if result.unexpected_keys:
        raise RuntimeError(f"peft did not take {result.unexpected_keys[0]}")


def _lora_layers(network: nn.Module) -> dict[str, LoraLayer]:
    return {
        path: module for path, module in network.named_modules() if isinstance(module, LoraLayer)
    }

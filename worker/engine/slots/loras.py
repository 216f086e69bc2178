"""Reads the LoRAs that requests name, and packs them for slots."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from imagefleet.files.safetensors import Identity
from imagefleet.job import differences
from worker.engine import contract
from worker.engine.families.table import Family
from worker.engine.lora import file as lora_file
from worker.engine.lora import merge
from worker.engine.lora.file import LoraFile, Network
from worker.engine.lora.merge import AppliedLora, PackedLoras

#: LoRA files in memory: some 75 of rank 32.
_CACHE_BYTES = 2 * 1024**3

Applied = Mapping[Network, Sequence[AppliedLora]]
"""A request's LoRAs, by the network that they change."""


class LoraReader:
    """The LoRA files of one model; thread-safe."""

    def __init__(
        self,
        family: Family,
        networks: Mapping[str, Any],
        groups: Mapping[Network, merge.Groups],
    ) -> None:
        """*networks*: the model's, by name; *groups*: of each, what slots hold changes of."""
        self.groups = groups
        self._family = family
        # Diffusers looks through all of a network for its type.
        self.dtypes: Mapping[Network, torch.dtype] = {
            name: networks[name].dtype for name in groups
        }
        encoders = {name: networks[name] for name in family.networks}
        layers = lora_file.Layers(
            networks[family.backbone],
            encoders,
            family.backbone,
            family.original_names,
        )
        self.cache = lora_file.LoraCache(layers, _CACHE_BYTES)

    def read(
        self, loras: Sequence[contract.Lora], wait: Callable[[], object]
    ) -> Applied:
        """Each network's LoRAs, if any; weights of one that is named twice add up, in any order.

        *wait* is called before each file.
        """
        family = self._family
        files: dict[Identity, LoraFile] = {}
        weights = defaultdict[tuple[Network, Identity], float](float)
        for lora in loras:
            wait()
            file = self.cache.get(lora)
            files[file.identity] = file
            weights[family.backbone, file.identity] += lora.unet_weight
            for network in family.networks:
                weights[network, file.identity] += lora.text_encoder_weight
        if len(files) > 1 and any(file.depends_on_weights for file in files.values()):
            differences.warn("mixed_loras")
        applied = defaultdict[Network, list[AppliedLora]](list)
        for (network, identity), weight in sorted(weights.items()):
            deltas = files[identity].deltas[network]
            if weight and deltas:
                applied[network].append(AppliedLora(identity, deltas, weight))
        return applied

    def pack(self, loras: Applied) -> dict[Network, PackedLoras]:
        """Each network's LoRAs for the device, where slots can hold them all."""
        packs = {}
        for network, found in loras.items():
            packed = merge.pack(found, self.groups[network], dtype=self.dtypes[network])
            if packed is not None:
                packs[network] = packed
        return packs

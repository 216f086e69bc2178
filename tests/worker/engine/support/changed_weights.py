"""LoRAs of a few tensors, and what the weights of the UNet are with them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from drawing import make_request
from worker.engine import contract
from worker.engine.lora.file import adaptable

Array = npt.NDArray[np.float64]
Tensors = Mapping[str, Any]

#: Makes a layer's tensors of one kind for a weight, and the change that they are by definition.
Change = tuple[Tensors, Array]
Kind = Callable[[Array], Change]

STRENGTH = 0.7


def drawn(*shape: int) -> Array:
    random = np.random.default_rng(sum(shape))
    return random.standard_normal(shape).astype(np.float32).astype(np.float64)


def write(path: Path, tensors: Mapping[str, Any]) -> contract.Lora:
    found = {
        key: each.clone()
        if torch.is_tensor(each)
        else torch.from_numpy(np.asarray(each))
        if np.asarray(each).dtype == bool
        else torch.from_numpy(np.asarray(each, np.float32)).contiguous()
        for key, each in tensors.items()
    }
    save_file(found, path)
    return contract.Lora(path.stem, path, STRENGTH, STRENGTH)


def prefixed(path: str, parts: Tensors, prefix: str = "lora_unet_") -> dict[str, Any]:
    return {
        f"{prefix}{path.replace('.', '_')}.{name}": each for name, each in parts.items()
    }


def merged(engine: Any, lora: contract.Lora, *paths: str) -> list[Array]:
    """What the UNet's parameters are with a LoRA; the base's are restored bit-exactly."""
    found = {path: adaptable(engine.checkpoint.unet)[path] for path in paths}
    before = {path: each.detach().clone() for path, each in found.items()}
    loras = engine.prepare(make_request(loras=(lora,))).loras
    engine._merger.activate(loras["unet"])
    after = [each.detach().double().numpy().copy() for each in found.values()]
    engine._merger.activate(())
    assert all(torch.equal(each, before[path]) for path, each in found.items())
    return after


def base(engine: Any, path: str) -> Array:
    return adaptable(engine.checkpoint.unet)[path].detach().double().numpy().copy()

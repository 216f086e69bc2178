"""The tiny model's layers, and a cache of LoRA files for them."""

from __future__ import annotations

from typing import Any

import pytest

from worker.engine.lora import cache as lora_cache
from worker.engine.lora import names


@pytest.fixture(scope="module")
def layers(engine: Any) -> names.Layers:
    layers: names.Layers = engine._preparer._lora_cache._layers
    return layers


@pytest.fixture
def cache(layers: names.Layers) -> lora_cache.LoraCache:
    return lora_cache.LoraCache(layers, cache_bytes=10**9)

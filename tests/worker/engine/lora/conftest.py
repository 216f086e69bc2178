"""The tiny model's layers, and a cache of LoRA files for them."""

import pytest

from worker.engine.lora import file as lora_file


@pytest.fixture(scope="module")
def layers(engine) -> lora_file.Layers:
    return engine._preparer._loras.cache._layers


@pytest.fixture
def cache(layers: lora_file.Layers) -> lora_file.LoraCache:
    return lora_file.LoraCache(layers, cache_bytes=10**9)

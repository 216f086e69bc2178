"""Slots draw the same images however they hold LoRAs, for every kind of LoRA."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from drawing import ROUNDING, difference, draw, make_request
from families import lora_kinds
from worker.engine import checkpoint as checkpoints
from worker.engine import contract
from worker.engine.contract import Settings
from worker.engine.families.latents import of_latents
from worker.engine.slots import memory
from worker.engine.slots.engine import SlotEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(family_folder) -> Iterator[dict[str, SlotEngine]]:
    """A tiny SDXL with slots of each kind."""
    made = {}
    for weights in get_args(memory.SlotWeights):
        cpu = torch.device("cpu")
        loaded = checkpoints.load_checkpoint(family_folder("sdxl"), cpu, torch.float32)
        made[weights] = SlotEngine(
            of_latents(loaded, Settings(slots=3, slot_weights=weights))
        )
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def loras(family_folder, tmp_path_factory) -> dict[str, contract.Lora]:
    folder = tmp_path_factory.mktemp("loras")
    found = {}
    kinds = [
        ("small", "lora", 4),
        ("large", "lora", 40),
        ("locon", "locon", 8),
        ("loha", "loha", 3),
        ("dora", "dora", 4),
    ]
    for name, kind, rank in kinds:
        (file,) = lora_kinds.build(
            folder / name,
            family_folder("sdxl"),
            1,
            torch.device("cpu"),
            rank=rank,
            kind=kind,
        )
        path = folder / name / f"{file}.safetensors"
        found[name] = contract.Lora(name, path, 0.2, 0.2)
    return found


@pytest.mark.parametrize(
    "names", [["small"], ["large"], ["locon"], ["loha"], ["small", "large"]]
)
def test_each_kind_draws_as_with_merged_weights(
    names: list[str],
    engines: dict[str, SlotEngine],
    loras: dict[str, contract.Lora],
):
    request = make_request(loras=tuple(loras[each] for each in names), steps=3)
    plain = make_request(steps=3)
    images = {}
    for name, engine in engines.items():
        # Beside an image without LoRAs: with one for all, it would be merged for all.
        images[name], beside = draw(engine, request, plain)
        assert engine.weight_mode != "shared"
        assert difference(beside, draw(engine, plain)[0]) <= ROUNDING
    assert difference(images["merged"], images["reloaded"]) <= ROUNDING
    assert difference(images["merged"], beside) > 20, "or the test shows nothing"

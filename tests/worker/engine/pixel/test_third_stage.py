"""The x4 upscaler in a worker: jobs of its own, and the third stage of a cascade in pixels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drawing import ROUNDING, difference, draw, make_request
from families import tiny_families
from imagefleet.storage.open import Storage
from messages import message
from pixel import tiny_cascade
from storages import local_only
from worker.engine import contract, load
from worker.engine.slots import engine as slots
from worker.node import start_up

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return tiny_families.build_upscaler(tmp_path_factory.mktemp("upscaler") / "x4")


@pytest.fixture
def upscaler(folder: Path) -> Iterator[slots.SlotEngine]:
    engine = load.load_engine(load.EngineSettings(folder, "cpu", slots=3))
    yield engine
    engine.close()


@pytest.fixture
def request_of() -> Any:
    def make(
        pixels: contract.Pixels, strength: float, **changes: Any
    ) -> contract.ImageRequest:
        height, width, _ = pixels.shape
        fields = {
            "prompt": "A red house",
            "steps": 4,
            "width": 4 * width,
            "height": 4 * height,
        }
        init = contract.InitImage(pixels, strength)
        return make_request(**{**fields, "init": init, **changes})

    return make


@local_only
async def test_a_cascade_of_three_stages_ends_with_the_x4_upscaler(
    storage: Storage,
    run_pipeline,
    make_engine,
    upscaler,
    folder: Path,
    request_of,
    stored,
):
    base = make_engine()
    middle = make_engine("sr")
    fields = {
        "prompt": "A red house",
        "negative_prompt": "blurry",
        "seed": 1,
    }
    fields |= {"steps": 4, "cfg_scale": 7, "sampler_name": "DDPM"}
    then = [
        {"model": middle.model_name, "denoising_strength": 0.25},
        {
            "model": upscaler.model_name,
            "denoising_strength": 0.1,
            "sampler_name": "Euler a",
        },
    ]
    await storage.models.send(
        [message(**fields, id="one", model=base.model_name, then=then)]
    )
    for engine in (base, middle, upscaler):
        await run_pipeline(engine)
    (small, _), (large, _) = [await stored(f"one~s{at}") for at in (2, 3)]
    assert small.shape[:2] == (tiny_cascade.SR_SIDE, tiny_cascade.SR_SIDE)
    assert large.shape[:2] == (4 * tiny_cascade.SR_SIDE, 4 * tiny_cascade.SR_SIDE)
    again = load.load_engine(load.EngineSettings(folder, "cpu", slots=3))
    (expected,) = draw(again, request_of(small, 0.1, seed=1))
    again.close()
    assert difference(large, expected) <= ROUNDING


def test_a_nodes_plain_image_is_enlarged_from_another_and_needs_no_stored_states(
    upscaler, make_engine, without_encoder: Path
):
    for engine in (upscaler, make_engine("sr"), make_engine(folder=without_encoder)):
        (image,) = draw(engine, start_up.plain_request(engine, seed=0))
        width, height = engine.default_size
        assert image.shape == (height, width, 3)
    assert start_up.plain_request(make_engine(), seed=0).init is None

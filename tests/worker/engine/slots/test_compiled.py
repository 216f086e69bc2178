import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny_model
from drawing import assert_alike, difference, draw, draw_alone, make_request
from imagefleet.job.samplers import Options
from packages import TracedPackages
from rows.process import decibels
from worker.engine import checkpoint as checkpoints
from worker.engine import contract, load
from worker.engine.contract import Settings
from worker.engine.families.latents import of_latents
from worker.engine.slots import engine as slot_engine

pytestmark = pytest.mark.slow


#: Uncompiled against compiled images, in float32; one level at every pixel would be 48 dB.
LEAST_DECIBELS = 50.0


small_request = partial(make_request, width=32, height=32)


@pytest.fixture(scope="module")
def warm_engine(small_model: Path) -> slot_engine.SlotEngine:
    """Traced as on a GPU, without generating kernels."""
    loaded = checkpoints.load_checkpoint(
        small_model, torch.device("cpu"), torch.float32
    )
    never = Settings(slots=2, packages=TracedPackages(), queue_seconds=lambda: 0.0)
    engine = slot_engine.SlotEngine(of_latents(loaded, never))
    engine.warm_up()
    return engine


@pytest.fixture
def compiled_engine(
    warm_engine: slot_engine.SlotEngine,
) -> Iterator[slot_engine.SlotEngine]:
    """The same for every test: other graphs than those of the native size are dropped after it."""
    yield warm_engine
    for lane in list(warm_engine._lanes):
        if lane.step and lane.batch_key != warm_engine._runner.native:
            lane.close()
            warm_engine._runner._compiled.pop(lane.batch_key, None)


@pytest.fixture
def one_mode(
    compiled_engine: slot_engine.SlotEngine, monkeypatch
) -> slot_engine.SlotEngine:
    """Compiles what else is asked for with shared weights alone."""
    monkeypatch.setattr(compiled_engine._runner, "_compiled_modes", ("shared",))
    return compiled_engine


@pytest.fixture(scope="module")
def plain_engine(small_model: Path) -> contract.Engine:
    return load.load_engine(load.EngineSettings(small_model, "cpu", slots=1))


def test_the_tick_in_each_mode_and_the_vae_are_compiled(
    compiled_engine: slot_engine.SlotEngine,
):
    (call,) = compiled_engine._runner._compiled.values()
    assert set(call.compiled) == {"per_slot", "shared"}
    assert len(compiled_engine._decoder._compiled) == 1
    assert compiled_engine.graphs["compiled"] == 3


def test_compiled_images_are_those_drawn_uncompiled(
    compiled_engine: slot_engine.SlotEngine,
    plain_engine: contract.Engine,
    small_model: Path,
    tmp_path,
):
    paths = [
        tiny_model.build_tiny_lora(
            tmp_path / f"{rank}.safetensors", small_model, rank=rank, seed=rank
        )
        for rank in (2, 4, 9)
    ]
    style = [contract.Lora(path.stem, path, 1.0, 1.0) for path in paths]
    requests = [
        small_request(),
        small_request(seed=2, loras=(style[0],), steps=6, cfg_scale=3.0),
        small_request(seed=3, loras=(style[1], style[2]), prompt="a castle, " * 12),
        small_request(seed=4, sampler="plms", steps=5),
        small_request(seed=5, sampler="ddim", loras=(style[2],)),
        small_request(seed=6, prompt="a castle on a hill, " * 11),  # uncompiled
    ]
    images = draw(compiled_engine, *requests)
    assert_alike(images, draw_alone(plain_engine, requests))


def test_slots_of_one_row_are_compiled_beside_those_of_two(
    one_mode: slot_engine.SlotEngine, plain_engine: contract.Engine
):
    requests = [
        small_request(seed=1),
        small_request(seed=2, cfg_scale=1.0),
        small_request(seed=3, sampler_options=Options(s_min_uncond=1000.0)),
    ]
    one_mode.warm_up(requests[1])
    assert {key.slot_rows for key in one_mode._runner._compiled} == {1, 2}
    images = draw(one_mode, *requests)
    expected = draw_alone(plain_engine, requests)
    assert min(map(decibels, images, expected)) > LEAST_DECIBELS


def test_jobs_that_begin_with_an_image_run_compiled(
    compiled_engine: slot_engine.SlotEngine,
    small_model: Path,
    make_slot_engine,
):
    """Nor do second passes; one of another size runs uncompiled, as other jobs of that size."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    mask = np.zeros((32, 32), np.uint8)
    mask[:, 16:] = 255
    second = {"denoising_strength": 0.7, "steps": 3, "upscaler": "Latent"}
    requests = [
        small_request(),
        small_request(seed=2, init=contract.InitImage(pixels, 0.6)),
        small_request(
            seed=3, init=contract.InitImage(pixels, 0.8, mask), sampler="plms"
        ),
        small_request(seed=4, init=contract.InitImage(pixels, 0.8, mask)),
        make_request(
            width=24, height=24, seed=5, hires=contract.HiresPass(32, 32, **second)
        ),
        small_request(seed=6, hires=contract.HiresPass(40, 40, **second)),
    ]
    images = draw(compiled_engine, *requests)
    (call,) = compiled_engine._runner._compiled.values()
    assert call.compiled["shared"].is_compiled
    uncompiled = make_slot_engine(model=small_model, slots=2)
    assert_alike(images, draw_alone(uncompiled, requests))


def test_controlnets_are_compiled_with_the_tick_and_run_compiled(
    one_mode: slot_engine.SlotEngine,
    plain_engine: contract.Engine,
    small_model: Path,
    make_control,
):
    """Other lanes keep their graphs. The model hardly changes its noise: weights are large."""
    (before,) = one_mode._runner._compiled.values()
    graphs = dict(before.compiled)

    def control(seed: int, **changes: Any) -> contract.Control:
        pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
        return make_control(0, small_model, pixels=pixels, **changes)

    requests = [
        small_request(controls=(control(1, weight=60),)),
        small_request(seed=2, controls=(control(2, weight=90, end=0.4),), steps=6),
        small_request(
            seed=3, controls=(control(3, weight=60, end=0.7),), sampler="plms"
        ),
        small_request(),
    ]
    one_mode.warm_up(requests[0])
    first, steered = one_mode._runner._compiled.values()
    assert first is before
    assert steered.compiled["shared"].is_compiled
    images = draw(one_mode, *requests)
    assert before.compiled == graphs
    assert_alike(images, draw_alone(plain_engine, requests))
    assert difference(images[0], images[3]) > 20


def test_images_that_tile_have_a_graph_of_their_own(
    one_mode: slot_engine.SlotEngine, plain_engine: contract.Engine
):
    """With latents that do not halve evenly; images are those drawn uncompiled."""
    requests = [
        make_request(width=40, height=24, seed=seed, tiling=tiling)
        for seed in (1, 2)
        for tiling in (True, False)
    ]
    one_mode.warm_up(requests[0])
    images = draw(one_mode, *requests)
    assert len(one_mode._runner._compiled) == 2
    assert_alike(images, draw_alone(plain_engine, requests))
    assert difference(images[0], images[1]) > 20


def test_changes_of_convolutions_are_compiled_once_they_are_frequent(
    compiled_engine: slot_engine.SlotEngine,
    plain_engine: contract.Engine,
    tmp_path,
    monkeypatch,
):
    name = "lora_unet_mid_block_resnets_0_conv1"
    requests = []
    for seed in range(5):
        tensors = {
            f"{name}.lora_down.weight": torch.randn(4, 32, 3, 3) / 17,
            f"{name}.lora_up.weight": torch.randn(32, 4, 1, 1) / 2,
        }
        path = tmp_path / f"{seed}.safetensors"
        save_file(tensors, path)
        loras = (contract.Lora(path.stem, path, 0.0, 1.0),)
        requests.append(small_request(seed=seed, steps=2, loras=loras))
    monkeypatch.setattr(
        compiled_engine._runner.outlook, "_seconds_left", lambda: math.inf
    )
    images = draw(compiled_engine, *requests)
    compiled_engine._compilation.finish()
    (call,) = compiled_engine._runner._compiled.values()
    assert "per_slot_convolutions" in call.compiled
    images += draw(compiled_engine, requests[0])
    assert_alike(images, draw_alone(plain_engine, [*requests, requests[0]]))

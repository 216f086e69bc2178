from pathlib import Path

import numpy as np
import pytest

from drawing import ROUNDING, assert_alike, difference, draw, draw_alone
from imagefleet import errors
from imagefleet.job.noise import Noise
from imagefleet.job.prompt import read_negative_prompt, read_prompt
from imagefleet.job.samplers import Options
from packages import TracedPackages
from worker.engine import contract, load
from worker.engine.slots.engine import SlotEngine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["base", "sr"])
def test_an_image_does_not_depend_on_its_neighbours(name: str, make_engine, request_of):
    engine = make_engine(name, slots=3)
    requests = [
        request_of(name, seed=1),
        request_of(name, seed=2, prompt="two dogs", steps=3),
        request_of(name, seed=3, sampler="euler", steps=5),
        request_of(name, seed=4, sampler="euler_ancestral", cfg_scale=1.0),
        request_of(name, seed=1),
        request_of(name, seed=5, sampler="dpmpp_2m_karras", steps=6),
        request_of(name, seed=6, noise=Noise(source="NV")),
    ]
    together = draw(engine, *requests)
    assert_alike(together, draw_alone(engine, requests))
    assert difference(together[0], together[4]) <= ROUNDING, "whatever the slot"
    assert len({image.tobytes() for image in together}) >= 6


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "base",
            {"width": 32},
            "32x16 pixels cannot be drawn: this stage draws 16x16 alone",
        ),
        (
            "base",
            {"loras": (contract.Lora("a", Path("a"), 1, 1),)},
            "does not support LoRAs",
        ),
        (
            "base",
            {
                "controls": (
                    contract.Control("a", Path("a"), np.zeros((1, 1, 3), np.uint8)),
                )
            },
            "does not support ControlNets",
        ),
        (
            "base",
            {"hires": contract.HiresPass(32, 32, 0.5, 5, "Latent")},
            "a second pass",
        ),
        (
            "base",
            {"prompt": read_prompt("a AND b")},
            "does not support AND or prompt editing",
        ),
        (
            "sr",
            {"negative_prompt": read_negative_prompt("[a|b]")},
            "AND or prompt editing",
        ),
        (
            "base",
            {"init": contract.InitImage(np.zeros((16, 16, 3), np.uint8), 0.5)},
            "does not support init_images",
        ),
        ("sr", {"init": None}, "the job needs init_images"),
        ("base", {"sampler": "ddim"}, "DDIM does not work on pixels"),
    ],
)
def test_what_a_stage_cannot_draw_is_refused(
    name: str, changes, message: str, make_engine, request_of
):
    with pytest.raises(errors.JobError, match=message):
        make_engine(name).prepare(request_of(name, **changes))


def test_options_of_samplers_are_used(make_engine, request_of):
    engine = make_engine()
    plain, churned, half = draw(
        engine,
        request_of(sampler="euler"),
        request_of(sampler="euler", sampler_options=Options(s_churn=4.0)),
        request_of(sampler="euler", sampler_options=Options(s_min_uncond=1e6)),
    )
    assert difference(plain, churned) > 10
    assert difference(plain, half) > 10


# Compiling.


@pytest.mark.parametrize("name", ["base", "sr"])
def test_compiled_ticks_draw_the_same_images(name: str, make_engine, request_of):
    requests = [request_of(name, seed=seed, steps=2 + seed) for seed in range(3)]
    expected = draw(make_engine(name, slots=2), *requests)
    engine = make_engine(name, slots=2, packages=TracedPackages())
    engine.warm_up()
    assert_alike(draw(engine, *requests), expected)
    (step,) = engine._runner._compiled.values()
    assert step.compiled["shared"].is_compiled


# Loading.


def test_an_engine_is_found_by_what_the_model_is(stage, checkpoint: Path):
    base, sr = (
        load.load_engine(load.EngineSettings(stage(name), "cpu", slots=2))
        for name in ("base", "sr")
    )
    assert (base.family, base.default_size, base.slots) == ("if", (16, 16), 2)
    assert (sr.family, sr.default_size) == ("if_sr", (32, 32))
    assert base.model_name == "base"
    assert (base.find_embeddings(["a"], ["a"]), base.self_check) == ((), None)
    latent = load.load_engine(
        load.EngineSettings(checkpoint, "cpu", slots=1, compiled_modes=())
    )
    assert isinstance(latent, SlotEngine)
    for engine in (base, sr, latent):
        engine.close()


def test_requests_of_another_engine_are_refused(
    make_engine,
):
    with pytest.raises(TypeError, match="prepared by another engine"):
        make_engine().admit(0, object())


def test_a_stage_of_a_cascade_enlarges_images_as_well(
    make_engine, request_of, low_image: contract.Pixels
):
    height, width = low_image.shape[:2]
    size = 2 * width, 2 * height
    upscale = contract.Upscale(*size, size, 2.0, (("Nearest", None),))
    request = request_of(init=contract.InitImage(low_image, 0.0), upscale=upscale)
    drawn, enlarged = draw(make_engine(), request_of(), request)
    assert drawn.shape != enlarged.shape
    assert np.array_equal(enlarged, low_image.repeat(2, axis=0).repeat(2, axis=1))

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drawing import ROUNDING, assert_alike, difference, draw, draw_alone
from imagefleet import errors
from imagefleet.job.prompt import read_prompt
from imagefleet.job.samplers import Options
from packages import TracedPackages
from worker.engine import contract
from worker.engine.slots import memory
from worker.engine.slots.queue import BatchKey

pytestmark = pytest.mark.slow


def grey(width: int, height: int) -> contract.Pixels:
    columns = np.linspace(0, 255, width, dtype=np.uint8)
    return np.repeat(columns[None, :, None], height, axis=0).repeat(3, axis=2)


def test_an_image_does_not_depend_on_its_neighbours(make_engine, request_of):
    engine = make_engine(slots=3)
    requests = [
        request_of(seed=1),
        request_of(seed=2, prompt="two dogs", steps=2),
        request_of(seed=3, width=128, steps=3),
        request_of(seed=4, negative_prompt="blurry", cfg_scale=1.0),
        request_of(seed=1),
        request_of(seed=5, steps=8),
        request_of(seed=6, width=128, height=96),
    ]
    together = draw(engine, *requests)
    assert_alike(together, draw_alone(engine, requests))
    assert difference(together[0], together[4]) <= ROUNDING, "whatever the slot"
    assert len({image.tobytes() for image in together}) >= 6


def test_a_distilled_model_draws_one_row_whatever_guidance_says(
    make_engine, request_of
):
    engine = make_engine()
    first, second = draw(
        engine,
        request_of(cfg_scale=7.0, negative_prompt="blurry"),
        request_of(cfg_scale=1.0),
    )
    assert difference(first, second) <= ROUNDING
    assert engine.unet_rows == 8


def test_memory_is_planned_for_the_one_row_that_slots_have(make_engine, monkeypatch):
    engine = make_engine()
    make = engine._runner.make_slot_state
    rows = []

    def note(key: BatchKey, *others: Any) -> Any:
        rows.append(key.slot_rows)
        return make(key, *others)

    monkeypatch.setattr(engine._runner, "make_slot_state", note)
    monkeypatch.setattr(memory, "is_too_large", lambda *_: False)
    monkeypatch.setattr(memory, "fit", lambda *_, **__: memory.Fit(1, 1, 1, 1, 1))
    engine._fit_memory(SimpleNamespace(settings=contract.Settings()))
    assert rows == [1]


def test_a_prompt_is_text_as_it_stands(make_engine, request_of):
    engine = make_engine()
    prepared = engine.prepare(
        request_of(prompt=read_prompt("A (red:1.3) House BREAK x"))
    )
    assert prepared.prompts == ("A (red:1.3) House BREAK x",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "euler_ancestral"}, "Euler a does not work on this model"),
        ({"sampler": "euler_karras"}, "use Euler with the scheduler Automatic"),
        ({"sampler": "ddim"}, "DDIM does not work on this model"),
        ({"prompt": read_prompt("a AND b")}, "does not support AND or prompt editing"),
        ({"prompt": read_prompt("[a:b:0.5]")}, "AND or prompt editing"),
        (
            {"hires": contract.HiresPass(128, 128, 0.5, 5, "Latent")},
            "does not support a second pass",
        ),
        (
            {
                "controls": (
                    contract.Control("a", Path("a"), np.zeros((1, 1, 3), np.uint8)),
                )
            },
            "does not support ControlNets",
        ),
        ({"tiling": True}, "does not support tiling"),
        ({"is_detailed": True}, "does not support ADetailer"),
        ({"prompt": "two dogs " * 100}, "'two dogs .* has 9.. tokens .* reads 512"),
        ({"sampler_options": Options(s_churn=2)}, "s_churn and img2img_extra_noise"),
    ],
)
def test_what_klein_cannot_draw_is_refused_with_the_reason(
    changes, message: str, make_engine, request_of
):
    with pytest.raises(errors.JobError, match=message):
        make_engine().prepare(request_of(**changes))


def test_img2img_keeps_more_of_the_image_at_less_strength(make_engine, request_of):
    engine = make_engine()
    image = grey(64, 64)
    weak, strong, none = draw(
        engine,
        request_of(steps=8, init=contract.InitImage(image, 0.1)),
        request_of(steps=8, init=contract.InitImage(image, 0.6)),
        request_of(steps=8),
    )
    coder = engine._stager._images
    kept = coder.decode(coder.encode(image))
    assert difference(weak, kept) < difference(strong, kept)
    assert difference(strong, none) > ROUNDING


def test_an_image_to_begin_with_loses_what_fills_no_cell(make_engine, request_of):
    engine = make_engine()
    init = contract.InitImage(grey(88, 72), 0.5)
    (drawn,) = draw(engine, request_of(width=88, height=72, init=init))
    assert drawn.shape == (64, 80, 3)


def test_latents_of_an_image_are_those_of_diffusers(make_engine, pipeline):
    engine = make_engine()
    image = grey(64, 96)
    latents = engine._stager._images.encode(image)
    levels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        theirs = pipeline()._encode_vae_image(levels / 127.5 - 1, torch.Generator())
    assert (latents - theirs[0]).abs().max() < 1e-5


def test_compiled_ticks_draw_the_same_images(make_engine, request_of):
    requests = [request_of(seed=seed, steps=2 + seed) for seed in range(3)]
    expected = draw(make_engine(slots=2), *requests)
    engine = make_engine(slots=2, packages=TracedPackages())
    engine.warm_up()
    assert_alike(draw(engine, *requests), expected)
    (step,) = engine._runner._compiled.values()
    assert step.compiled["shared"].is_compiled

"""DPM adaptive in slots: images whose number of calls nobody knows, beside others."""

from functools import partial

import numpy as np
import pytest

from drawing import difference, draw, make_request
from imagefleet import errors
from worker.engine import contract
from worker.engine.samplers import adaptive as lengths


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch) -> None:
    """A third of the usual, and yet as many as each image needs."""
    monkeypatch.setattr(lengths, "_RELATIVE", 0.5)


adaptive = partial(make_request, sampler="dpm_adaptive", width=32, height=32)


@pytest.mark.slow
def test_an_image_of_unknown_calls_is_what_it_is_alone(slot_engine):
    asked = [
        adaptive(seed=1),
        adaptive(seed=3, sampler="heun", steps=9),
        adaptive(seed=6, cfg_scale=1.0),
    ]
    together = draw(slot_engine, *asked)
    assert len({image.tobytes() for image in together}) == len(asked)
    for request, image in zip(asked, together, strict=True):
        (alone,) = draw(slot_engine, request)
        # The lengths of its steps follow the rounding, which is another with each width of a batch.
        assert difference(alone, image) <= (
            8 if request.sampler == "dpm_adaptive" else 2
        )


def test_its_second_pass_and_the_steps_that_are_given_change_what_they_change(
    slot_engine,
):
    hires = contract.HiresPass(
        64, 64, denoising_strength=0.6, steps=3, upscaler="Latent"
    )
    plain, longer, enlarged = draw(
        slot_engine, adaptive(), adaptive(steps=40), adaptive(hires=hires)
    )
    assert np.array_equal(plain, longer), "it has no number of steps, there either"
    assert enlarged.shape[:2] == (64, 64)


def test_a_failed_image_begins_again_with_its_first_row(make_slot_engine):
    engine = make_slot_engine()
    request = adaptive(seed=3)
    (whole,) = draw(engine, request)
    engine.admit(0, engine.prepare(request))
    for _ in range(7):
        assert not engine.tick()
    (job,) = next(iter(engine._lanes)).active.values()
    assert job.calls > 3
    job.restart()
    assert (job.call, job.calls) == (0, 3)
    del next(iter(engine._lanes)).active[0]
    engine._add(job)
    finished = []
    while not finished:
        finished = list(engine.tick())
    assert difference(finished[0].outcome, whole) <= 2


def test_it_cannot_be_controlled(slot_engine, make_control):
    request = adaptive(controls=(make_control(0),))
    with pytest.raises(errors.JobError, match="DPM adaptive cannot be controlled"):
        slot_engine.prepare(request)

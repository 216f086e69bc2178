"""The ends of schedules that img2img and second passes take."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import references
from imagefleet import errors
from imagefleet.job import samplers
from sampling import (
    alphas_cumprod,
    noises,
    relative_difference,
    sample,
    stand_in,
    taking,
)
from worker.engine import sampler
from worker.engine.passes import begin
from worker.engine.samplers import schedule as schedules

ALPHAS = alphas_cumprod()


def schedule(name: str, taken: begin.Steps, **options: Any) -> sampler.Schedule:
    given = samplers.Options(**options)
    return schedules.make_schedule(
        name, taken.steps, ALPHAS, "epsilon", given, t_enc=taken.t_enc
    )


@pytest.mark.parametrize(
    ("count", "strength", "t_enc"),
    [
        (20, 0.75, 15),
        (20, 0.0, 0),
        (20, 0.04, 0),
        (20, 1.0, 19),
        (1, 0.5, 0),
        (150, 1.0, 149),
    ],
)
def test_img2img_takes_fewer_steps_at_less_strength(
    count: int, strength: float, t_enc: int
):
    """AUTOMATIC1111's rule, by hand."""
    assert begin.img2img(count, strength) == (count, t_enc)


@pytest.mark.parametrize(
    ("count", "strength", "whole"),
    [(15, 0.7, 21), (20, 1.0, 20), (1, 0.3, 3), (5, 0.999, 5)],
)
def test_a_second_pass_takes_its_steps_at_any_strength(
    count: int, strength: float, whole: int
):
    assert begin.second_pass(count, strength) == (whole, count - 1)


BY_TIMESTEPS = ("ddim", "ddim_cfgpp", "plms", "unipc")

#: UNet calls of the end of a schedule.
CALLS: dict[str, Callable[[int], int]] = {
    "ddim": lambda t_enc: t_enc - 1,
    "ddim_cfgpp": lambda t_enc: t_enc - 1,
    "plms": lambda t_enc: t_enc - (t_enc < 2),
    "unipc": lambda t_enc: t_enc,
    **dict.fromkeys(
        ("euler", "lms", "dpmpp_2m_sde", "lcm", "tcd"), lambda t_enc: t_enc + 1
    ),
    **dict.fromkeys(("heun", "dpm_2", "dpmpp_sde"), lambda t_enc: 2 * t_enc + 1),
}


def missing_in_the_end(name: str, taken: begin.Steps) -> list[str]:
    """What the end of a sampler's schedule lacks."""
    made = schedule(name, taken)
    rows = len(made.table)
    holds = {
        "finite numbers": bool(made.table.isfinite().all()),
        "a row at least": rows >= 1,
        "a noise for each row": len(made.noisy) == rows,
        "an end for each row": len(made.finished) == rows,
        "a share of the image": 0 < made.image_scale <= 1,
    }
    if name in CALLS and (taken.t_enc > 0 or name not in BY_TIMESTEPS):
        holds["its calls"] = rows == max(1, CALLS[name](taken.t_enc))
    return [each for each, does_hold in holds.items() if not does_hold]


def test_every_sampler_has_a_finite_end_for_any_steps_and_strength():
    names = [name for name in samplers.SAMPLERS if "_" not in name or name in CALLS]
    strengths = (0.0, 0.01, 0.3, 0.5, 0.75, 0.99, 1.0)
    passes = itertools.chain(
        itertools.product((1, 2, 3, 7, 20), strengths), ((150, 0.01), (150, 1.0))
    )
    ends = [
        taken
        for count, strength in passes
        for taken in (
            begin.img2img(count, strength),
            begin.second_pass(count, max(0.2, strength)),
        )
    ]
    found = {
        name: {
            taken: missing
            for taken in ends
            if (missing := missing_in_the_end(name, taken))
        }
        for name in names
    }
    assert {name: missing for name, missing in found.items() if missing} == {}


def keeps_latents_without_a_step(name: str) -> bool:
    """Whether a sampler's only row for no step returns the latents that it is given."""
    made = schedule(name, begin.second_pass(20, 0.0), s_churn=10.0)
    scales = (made.image_scale, made.initial_scale, made.initial_churn or 0.0)
    (row,) = made.table[:, None]
    latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(1))
    history = latents.new_zeros((sampler.HISTORY, *latents.shape))
    image = sampler.Inpainting(torch.ones((1, 1, 8, 8)), torch.zeros_like(latents))
    after, _ = sampler.step(
        row, latents, torch.ones_like(latents), history, latents, image
    )
    return scales == (1.0, 0.0, 0.0) and torch.equal(after, latents)


def test_no_step_leaves_the_latents_as_they_are():
    changing = [
        name for name in samplers.SAMPLERS if not keeps_latents_without_a_step(name)
    ]
    assert changing == []


@pytest.mark.parametrize("s_churn", [8.0, 40.0])
def test_the_churn_of_the_end_of_a_schedule_is_k_diffusions(
    s_churn: float, k_diffusion, monkeypatch
):
    """It is shared among the steps that are taken."""
    image, *noise = noises(30)
    monkeypatch.setattr(torch, "randn_like", taking(noise[1:]))
    taken = begin.img2img(20, 0.6)
    reference = references.Reference(k_diffusion, stand_in, ALPHAS)
    theirs = reference.draw_end(
        "euler", reference.model, image, 20, taken.t_enc, noise, s_churn=s_churn
    )
    ours = sample(
        schedule("euler", taken, s_churn=s_churn), noise, stand_in, image=image
    )
    assert relative_difference(ours, theirs) < 2e-5


def test_s_min_uncond_counts_the_calls_of_the_pass():
    made = schedule("euler", begin.img2img(20, 0.5), s_min_uncond=3.0)
    whole = schedules.make_schedule(
        "euler", 20, ALPHAS, "epsilon", samplers.Options(s_min_uncond=3.0)
    )
    assert len(made.unguided) == 11
    assert made.unguided[0] is False
    assert sum(made.unguided) > 2
    assert made.unguided != whole.unguided[-11:], "there, another call is the first"


def test_the_end_of_a_schedule_that_is_too_short_is_a_jobs_error():
    """LCM has fifty sigmas: the last 40 of 133 steps are beyond them, an error there as well."""
    taken = begin.second_pass(40, 0.3)
    with pytest.raises(
        errors.JobError, match="LCM with the schedule DDIM has 49 steps"
    ):
        schedule("lcm_ddim", taken)

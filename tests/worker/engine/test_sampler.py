from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler

from drawing import assert_alike, draw, draw_alone, make_request
from imagefleet import errors
from imagefleet.job import samplers
from sampling import alphas_cumprod, noises, relative_difference, sample, stand_in
from worker.engine import sampler
from worker.engine.families import reading
from worker.engine.samplers import schedule as schedules

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LEADING = {**BETAS, "timestep_spacing": "leading", "steps_offset": 1}


def test_zero_terminal_snr_is_diffusers_but_for_the_last_value():
    scheduler = DDIMScheduler(**BETAS, rescale_betas_zero_snr=True)
    ours = reading.rescale_to_zero_terminal_snr(alphas_cumprod()).float()
    torch.testing.assert_close(
        ours[:-1], scheduler.alphas_cumprod[:-1], rtol=2e-4, atol=1e-7
    )


def a1111_timesteps(steps: int) -> list[int]:
    """Where AUTOMATIC1111's DDIM and PLMS call the UNet, without the last one, where they end."""
    return [1 + at for at in range(0, 1000, 1000 // steps)][:0:-1]


#: Also counts that do not divide 1000. For 3, the first timestep is 999 there, not 1000.
TIMESTEP_COUNTS = [2, 4, 15, 20, 30, 35, 50, 150]


@pytest.mark.parametrize("steps", TIMESTEP_COUNTS)
def test_plms_at_a1111s_timesteps_matches_diffusers(steps: int):
    noise = noises(1)
    reference = PNDMScheduler(**LEADING, skip_prk_steps=True)
    first, *others = a1111_timesteps(steps)
    timesteps = [first, first - 1000 // steps, *others]
    reference.set_timesteps(steps)
    (theirs,) = noise
    for timestep in torch.tensor(timesteps):
        theirs = reference.step(
            stand_in(theirs, timestep), timestep, theirs
        ).prev_sample
    schedule = schedules.make_schedule("plms", steps, alphas_cumprod(), "epsilon")
    assert schedule.table[:, sampler.TIMESTEP].tolist() == timesteps
    assert relative_difference(sample(schedule, noise, stand_in), theirs) < 1e-5


@pytest.mark.parametrize("eta", [None, 0.3, 1.0])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", TIMESTEP_COUNTS)
def test_ddim_at_a1111s_timesteps_matches_diffusers(
    steps: int, prediction_type: str, eta: float | None
):
    noise = noises(steps + 20)
    reference = DDIMScheduler(
        **LEADING,
        prediction_type=prediction_type,
        set_alpha_to_one=False,
        clip_sample=False,
    )
    reference.set_timesteps(steps)
    timesteps = a1111_timesteps(steps)
    theirs, *fresh = noise
    for timestep, drawn in zip(timesteps, fresh, strict=False):
        output = stand_in(theirs, torch.tensor(timestep))
        theirs = reference.step(
            output, timestep, theirs, eta=eta or 0.0, variance_noise=drawn
        ).prev_sample
    schedule = schedules.make_schedule(
        "ddim", steps, alphas_cumprod(), prediction_type, samplers.Options(eta=eta)
    )
    assert set(schedule.noisy) == {eta is not None}
    assert schedule.table[:, sampler.TIMESTEP].tolist() == timesteps
    assert relative_difference(sample(schedule, noise, stand_in), theirs) < 1e-5


def test_every_other_call_below_s_min_uncond_is_unguided():
    given = samplers.Options(s_min_uncond=2.0)
    schedule = schedules.make_schedule("euler", 10, alphas_cumprod(), "epsilon", given)
    plain = schedules.make_schedule("euler", 10, alphas_cumprod(), "epsilon")
    assert schedule.unguided == tuple(
        call % 2 == 1 and float(-sigma) < 2.0
        for call, sigma in enumerate(plain.table[:, 3])
    )
    assert any(schedule.unguided)
    assert not all(schedule.unguided[1::2])
    assert not any(plain.unguided)


def missing_in_the_rows(name: str, steps: int) -> list[str]:
    """What the rows of a sampler's schedule lack."""
    made = schedules.make_schedule(name, steps, alphas_cumprod(), "epsilon")
    rows = len(made.table)
    holds = {
        "finite numbers": bool(made.table.isfinite().all()),
        "a noise for each row": len(made.noisy) == rows,
        "an end for each row": len(made.finished) == rows,
        "ends in order": list(made.finished) == sorted(made.finished),
    }
    known = samplers.SAMPLERS[name]
    if known.schedule in (None, "uniform", "karras") and known.method not in (
        "unipc",
        "dpm_adaptive",
    ):
        by_timesteps = len(range(0, 1000, 1000 // steps)) - 1
        calls = dict.fromkeys(("ddim", "ddim_cfgpp"), by_timesteps)
        calls["plms"] = by_timesteps + 1
        holds["its calls"] = rows == calls.get(name, samplers.unet_calls(name, steps))
    return [each for each, does_hold in holds.items() if not does_hold]


@pytest.mark.slow
def test_every_sampler_has_finite_rows_for_any_number_of_steps():
    found = {
        name: {
            steps: missing
            for steps in (*range(known.least_steps, 16), 20, 33, 150)
            if (missing := missing_in_the_rows(name, steps))
        }
        for name, known in samplers.SAMPLERS.items()
    }
    assert {name: missing for name, missing in found.items() if missing} == {}


@pytest.mark.parametrize("name", ["heun_", "ddim_karras", "", "Euler a"])
def test_an_unknown_sampler_is_refused_listing_the_known_ones(name: str):
    with pytest.raises(
        errors.JobError, match="models of latents: Euler a, Euler, DPM\\+\\+ 2M, "
    ):
        schedules.make_schedule(name, 5, alphas_cumprod(), "epsilon")


#: Restart is Heun's method below 20 steps, and DPM fast goes its own way whatever its schedule.
SAME_AS_OTHERS = ("restart_sgm_uniform", "dpm_fast_sgm_uniform")


@pytest.mark.parametrize("name", samplers.SAMPLERS)
def test_the_image_of_the_last_call_is_what_is_drawn_whatever_its_sampler_estimates(
    name: str, monkeypatch
):
    step = sampler.step
    found = []

    def noting(rows: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stepped, history = step(rows, *given)
        found.append(sampler.image_of(rows[0], history))
        return stepped, history

    monkeypatch.setattr(sampler, "step", noting)
    made = schedules.make_schedule(name, 9, alphas_cumprod(), "epsilon")
    drawn = sample(made, noises(300), stand_in)
    assert relative_difference(found[-1], drawn) < 0.5  # some end above sigma 0


@pytest.mark.slow
def test_an_image_is_the_same_alone_and_with_other_samplers(slot_engine):
    names = [
        each.key
        for each in samplers.SAMPLERS.values()
        if each.key == each.method or each.schedule == "sgm_uniform"
        if each.key not in SAME_AS_OTHERS and each.method != "dpm_adaptive"
    ]
    requests = [
        make_request(sampler=name, steps=5, width=32, height=32) for name in names
    ]
    together = draw(slot_engine, *requests)
    assert len({image.tobytes() for image in together}) == len(requests) > 30
    assert_alike(together[::6], draw_alone(slot_engine, requests[::6]))


@pytest.mark.parametrize("name", ["euler", "ddim", "ddim_cfgpp", "plms", "unipc"])
def test_extra_noise_is_on_an_image_alone_and_of_its_scale(name: str):
    def made(extra_noise: float, t_enc: int | None) -> sampler.Schedule:
        options = samplers.Options(extra_noise=extra_noise)
        known = alphas_cumprod()
        return schedules.make_schedule(name, 10, known, "epsilon", options, t_enc=t_enc)

    usual = made(0, 6)
    extra = 0.25 * usual.image_scale
    assert made(0.25, 6).initial_scale == pytest.approx(usual.initial_scale + extra)
    assert (usual.image_scale == 1) == (name == "euler")
    assert made(0.25, None).initial_scale == made(0, None).initial_scale

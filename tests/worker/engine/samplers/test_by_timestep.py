"""UniPC, TCD, LCM, DDIM CFG++ and Restart against diffusers, or their formulas computed apart."""

import math
import sys
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    TCDScheduler,
    UniPCMultistepScheduler,
)

import references
from imagefleet.job.samplers import Options
from sampling import (
    alphas_cumprod,
    noises,
    relative_difference,
    sample,
    stand_in,
    taking,
    too_different,
)
from worker.engine import sampler
from worker.engine.samplers import by_timestep
from worker.engine.samplers.schedule import make_schedule

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
COUNTS = [1, 2, 3, 4, 5, 8, 12, 16, 25, 50]


def run(
    scheduler: Any, start: torch.Tensor, timesteps: Any, **options: Any
) -> torch.Tensor:
    latents = start
    for timestep in timesteps:
        output = stand_in(latents, timestep)
        latents = scheduler.step(output, timestep, latents, **options).prev_sample
    return latents


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("count", [3, 9, 27, 37, 111])
def test_unipc_is_diffusers_where_its_times_are_whole_timesteps(
    count: int, prediction: str, monkeypatch
):
    """AUTOMATIC1111's times are even fractions; diffusers rounds them."""
    monkeypatch.setattr(by_timestep, "ddim_timesteps", lambda *_: [0] * count)
    (noise,) = noises(1)
    scheduler = UniPCMultistepScheduler(
        **BETAS,
        solver_order=3,
        solver_type="bh1",
        prediction_type=prediction,
        timestep_spacing="linspace",
        final_sigmas_type="sigma_min",
    )
    scheduler.set_timesteps(count)
    made = make_schedule("unipc", count, alphas_cumprod(), prediction)
    assert made.table[:, sampler.TIMESTEP].tolist() == pytest.approx(
        scheduler.timesteps.tolist()
    )
    theirs = run(scheduler, noise, scheduler.timesteps)
    found = relative_difference(sample(made, [noise], stand_in), theirs)
    # Some of a hundred timesteps are cut off to the one before in AUTOMATIC1111.
    assert found < (1e-4 if count > 100 and prediction == "v_prediction" else 1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, None, 1.0])
def test_tcd_is_diffusers(eta: float | None, prediction: str, monkeypatch):
    module = sys.modules[TCDScheduler.__module__]
    scheduler = TCDScheduler(**BETAS, prediction_type=prediction, clip_sample=False)
    options = Options(eta=eta)
    gamma = 0.3 if eta is None else eta
    timesteps = {}
    found = {}
    for steps in COUNTS:
        noise = noises(steps + 1)
        monkeypatch.setattr(module, "randn_tensor", taking(noise[1:]))
        scheduler.set_timesteps(steps)
        made = make_schedule("tcd", steps, alphas_cumprod(), prediction, options)
        own = made.table[:, sampler.TIMESTEP].tolist()
        if own != scheduler.timesteps.tolist():
            timesteps[steps] = own
        theirs = run(scheduler, noise[0], scheduler.timesteps, eta=gamma)
        found[steps] = relative_difference(sample(made, noise, stand_in), theirs)
    assert timesteps == {}
    assert too_different(found) == {}


@pytest.mark.parametrize("steps", [5, 10, 20, 50])
def test_unipcs_velocities_are_of_the_timesteps_that_float32_tells(steps: int):
    """`NoiseScheduleVP` and `CompVisTimestepsVDenoiser`: the alpha of a time, cut off."""
    alphas = alphas_cumprod()
    different = {}
    for t_enc in (None, *range(1, steps)):
        made = make_schedule("unipc", steps, alphas, "v_prediction", t_enc=t_enc)
        start = torch.tensor(1.0)
        count = steps
        if t_enc is not None:
            start = torch.tensor(1 + (t_enc - 1) * (1000 // steps)) / 1000 + 1 / 1000
            count = t_enc
        times = torch.linspace(float(start), 1 / 1000, count + 1)[:-1]
        expected = ((times - 1 / 1000) * 1000).to(torch.int).tolist()
        found = [velocity_timestep(row, alphas) for row in made.table.double()]
        if found != expected:
            different[t_enc] = found, expected
    assert different == {}


def velocity_timestep(row: torch.Tensor, alphas: torch.Tensor) -> int:
    """The timestep of the alpha by which a row makes an image of a velocity."""
    latents = row[sampler.FROM_LATENTS]
    output = row[sampler.FROM_OUTPUT]
    scale = 2 * latents / (1 + latents**2 + output**2)
    alpha = (scale * output) ** 2 / (1 - scale**2)
    return int((alphas - alpha).abs().argmin())


@pytest.mark.parametrize(
    ("schedule", "timesteps"),
    [
        ("", [999, 679, 339, 19]),
        ("_simple", [999, 759, 499, 259]),
        ("_karras", [999, 759, 339, 19]),
    ],
)
def test_lcm_is_automatic1111s(schedule: str, timesteps: list[int]):
    """It calls the UNet at the nearest of the 50 timesteps that LCM was distilled on."""
    noise = noises(5)
    made = make_schedule(f"lcm{schedule}", 4, alphas_cumprod(), "epsilon")
    assert made.table[:, sampler.TIMESTEP].tolist() == timesteps
    sigmas = [*(-made.table[:, sampler.FROM_OUTPUT]).tolist(), 0.0]
    latents = noise[0] * sigmas[0]
    for (sigma, following), timestep, fresh in zip(
        pairwise(sigmas), timesteps, noise[1:], strict=True
    ):
        output = stand_in(latents / math.sqrt(sigma**2 + 1), torch.tensor(timestep))
        scaled = 10 * timestep
        out = scaled / math.hypot(scaled, 0.5)
        skip = 0.25 / (scaled**2 + 0.25)
        latents = (latents - sigma * output) * out + latents * skip + following * fresh
    assert relative_difference(sample(made, noise, stand_in), latents) < 1e-5


@pytest.mark.parametrize("schedule", ["", "_normal"])
@pytest.mark.parametrize(
    ("steps", "timesteps"),
    [
        (3, [999, 499, 19]),
        (5, [999, 759, 499, 259, 19]),
        (15, [999, 919, 859, 779, 719, 639, 579, 499, 439, 359, 299, 219, 159, 79, 19]),
    ],
)
def test_lcm_in_the_middle_of_two_of_its_timesteps_takes_the_lower_on_every_processor(
    schedule: str, steps: int, timesteps: list[int]
):
    made = make_schedule(f"lcm{schedule}", steps, alphas_cumprod(), "epsilon")
    assert made.table[:, sampler.TIMESTEP].tolist() == timesteps


@pytest.mark.parametrize("eta", [0.0, 0.7])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [2, 4, 15, 35, 100])
def test_ddim_cfgpp_puts_the_noise_without_the_prompt_back(
    steps: int, prediction: str, eta: float
):
    """Chung et al. (2024), algorithm 2, at AUTOMATIC1111's scale, of which 12.5 is 1."""

    def without(latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return stand_in(latents.roll(1, dims=-2), timesteps)

    def noise_of(
        unet: Any, latents: torch.Tensor, timestep: int, alpha: float
    ) -> torch.Tensor:
        output = unet(latents, torch.tensor(timestep))
        if prediction == "epsilon":
            return output
        return math.sqrt(alpha) * output + math.sqrt(1 - alpha) * latents

    noise = noises(steps + 20)
    alphas = alphas_cumprod().tolist()
    latents, *fresh = noise
    path = [1 + at for at in range(0, 1000, 1000 // steps)][::-1]
    for (timestep, following), drawn in zip(pairwise(path), fresh, strict=False):
        alpha = alphas[timestep]
        after = alphas[following]
        uncond = noise_of(without, latents, timestep, alpha)
        cond = noise_of(stand_in, latents, timestep, alpha)
        guided = uncond + 7 / 12.5 * (cond - uncond)
        image = (latents - math.sqrt(1 - alpha) * guided) / math.sqrt(alpha)
        deviation = eta * math.sqrt((1 - after) / (1 - alpha) * (1 - alpha / after))
        back = math.sqrt(1 - after - deviation**2)
        latents = math.sqrt(after) * image + back * uncond + deviation * drawn
    made = make_schedule(
        "ddim_cfgpp", steps, alphas_cumprod(), prediction, Options(eta=eta)
    )
    ours = sample(made, noise, stand_in, uncond=without, scale=7.0)
    assert relative_difference(ours, latents) < 1e-5


@pytest.mark.parametrize("schedule", ["uniform", "karras", "kl_optimal"])
@pytest.mark.parametrize("steps", [1, 8, 19, 20, 35, 36])
def test_restart_is_automatic1111s(k_diffusion, steps: int, schedule: str):
    """Xu et al. (2023): of 20 steps and more, some go back from sigma 0.1 to 2, by noise."""
    noise = noises(4)
    reference = references.Reference(k_diffusion, stand_in, alphas_cumprod())
    karras = k_diffusion.sampling.get_sigmas_karras
    sigmas = reference.sigmas(schedule, steps)
    parts = [sigmas]
    if steps >= 20:
        again, times = (9, 1) if steps < 36 else (steps // 4, 2)
        sigmas = karras(steps - again * times, float(sigmas[-2]), float(sigmas[0]))
        low, high = ((sigmas - end).abs().argmin() for end in (0.1, 2))
        back = karras(again + 1, float(sigmas[low]), float(sigmas[high]))[:-1]
        parts = [sigmas[: low + 1], *[back] * times, sigmas[low:]]
    fresh = iter(noise[1:])
    latents = noise[0] * parts[0][0]
    for before, part in pairwise([parts[0][:1], *parts]):
        if part[0] > before[-1]:
            latents = latents + next(fresh) * (part[0] ** 2 - before[-1] ** 2) ** 0.5
        latents = k_diffusion.sampling.sample_heun(
            reference.model, latents, part, disable=True
        )
    name = "restart" if schedule == "karras" else f"restart_{schedule}"
    made = make_schedule(name, steps, alphas_cumprod(), "epsilon")
    # One step from a sigma of 14.6 to one of 0.03 makes 500 of each rounding.
    limit = 1e-4 if (steps, schedule) == (1, "kl_optimal") else 2e-5
    assert relative_difference(sample(made, noise, stand_in), latents) < limit


TRAILING = {**BETAS, "timestep_spacing": "trailing"}

#: Distilled models by their makers' schedulers, and the samplers that draw with them.
FEW_STEPS: dict[str, tuple[str, Any]] = {
    "LCM": ("lcm_sgm_uniform", LCMScheduler(**BETAS, clip_sample=False)),
    "Lightning": ("euler_turbo", EulerDiscreteScheduler(**TRAILING)),
    "Turbo": ("euler_ancestral_turbo", EulerAncestralDiscreteScheduler(**TRAILING)),
    "Hyper": ("euler_turbo", DDIMScheduler(**TRAILING, clip_sample=False)),
    "PCM": ("euler_turbo", DDIMScheduler(**TRAILING, clip_sample=False)),
    "DMD2": ("lcm_turbo", LCMScheduler(**BETAS, clip_sample=False)),
}


@pytest.mark.parametrize(
    ("model", "steps"),
    [*product(FEW_STEPS, (1, 2, 4, 6, 8)), ("DMD2", 5), ("DMD2", 10)],
)
def test_few_steps_are_those_of_the_models_makers(model: str, steps: int, monkeypatch):
    """But for the first noise: diffusers scales it as its scheduler does (`init_noise_sigma`)."""
    key, scheduler = FEW_STEPS[model]
    noise = noises(steps + 1)
    module = sys.modules[type(scheduler).__module__]
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", taking(noise[1:]))
    if model == "DMD2":  # whose makers give LCMScheduler the timesteps
        trailing = EulerDiscreteScheduler(**TRAILING)
        trailing.set_timesteps(steps)
        scheduler.set_timesteps(timesteps=[*map(int, trailing.timesteps)])
    else:
        scheduler.set_timesteps(steps)
    made = make_schedule(key, steps, alphas_cumprod(), "epsilon")
    assert made.table[:, sampler.TIMESTEP].tolist() == scheduler.timesteps.tolist()
    scales = scheduler.init_noise_sigma == 1  # latents of variance 1
    scale = math.hypot(1, made.initial_scale) if scales else 1.0
    latents = noise[0] * made.initial_scale / scale
    for timestep in scheduler.timesteps:
        output = stand_in(scheduler.scale_model_input(latents, timestep), timestep)
        latents = scheduler.step(output, timestep, latents).prev_sample
    found = relative_difference(sample(made, noise, stand_in), latents)
    # LCM's sigmas lie between its timesteps in AUTOMATIC1111, whose sampler this is; and DDIM steps
    # beside its own next timestep where 1000 is no multiple of its steps.
    is_beside = isinstance(scheduler, DDIMScheduler) and 1000 % steps > 0
    is_between = model == "LCM" and steps > 1
    assert found < (2e-2 if is_beside or is_between else 1e-5)

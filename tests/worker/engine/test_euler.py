from __future__ import annotations

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler

from worker.engine import euler

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def alphas_cumprod() -> torch.Tensor:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0)


def test_sd15_starts_at_its_known_largest_sigma() -> None:
    schedule = euler.make_schedule(alphas_cumprod(), 15)
    assert schedule.sigmas[0] == pytest.approx(14.6146, abs=1e-4)
    assert schedule.sigmas[-1] == 0
    assert schedule.timesteps[0] == 999
    assert schedule.timesteps[-1] == 0
    assert euler.make_schedule(alphas_cumprod(), 1).timesteps == (999.0,)


# diffusers hands torch tensors to numpy 2 in a way that numpy will drop
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_every_step_is_that_of_diffusers(prediction_type: str) -> None:
    reference = EulerAncestralDiscreteScheduler(
        **BETAS, prediction_type=prediction_type, timestep_spacing="linspace"
    )
    reference.set_timesteps(15)
    schedule = euler.make_schedule(alphas_cumprod(), 15)
    assert schedule.timesteps == pytest.approx(reference.timesteps.tolist(), rel=1e-6)
    # diffusers interpolates the sigmas, k-diffusion and AUTOMATIC1111 their logarithms
    assert schedule.sigmas == pytest.approx(reference.sigmas.tolist(), rel=2e-5)

    generator = torch.Generator().manual_seed(0)
    latents = torch.randn((2, 4, 8, 8), generator=generator) * schedule.sigmas[0]
    for at, timestep in enumerate(reference.timesteps):
        sigma, next_sigma = schedule.sigmas[at : at + 2]
        scaled = reference.scale_model_input(latents, timestep)
        torch.testing.assert_close(euler.scale_input(latents, sigma), scaled, rtol=1e-4, atol=1e-5)
        output = torch.randn(latents.shape, generator=generator)
        stepped = reference.step(
            output, timestep, latents, torch.Generator().manual_seed(at)
        ).prev_sample
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(at))
        foreseen = euler.denoised(latents, output, sigma, prediction_type)
        ours = euler.step(latents, foreseen, sigma, next_sigma, noise if next_sigma else None)
        torch.testing.assert_close(ours, stepped, rtol=1e-3, atol=1e-3)
        latents = stepped

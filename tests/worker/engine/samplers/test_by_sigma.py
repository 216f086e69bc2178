"""Samplers of sigmas against k-diffusion, each with each schedule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import references
from imagefleet.job import samplers
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
from worker.engine.samplers.schedule import make_schedule

METHODS = list(references.METHODS)
STEP_COUNTS = [3, 15]


@pytest.fixture
def theirs(k_diffusion, monkeypatch) -> Callable[..., torch.Tensor]:
    """Draws with k-diffusion on a list of noise, the first of which the image begins with."""

    def draw(
        method: str,
        schedule: str,
        steps: int,
        noise: list[torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        monkeypatch.setattr(torch, "randn_like", taking(noise[1:]))
        made = references.Reference(k_diffusion, stand_in, alphas_cumprod())
        return made.draw(method, schedule, steps, noise, options)

    return draw


def check(
    theirs: Callable[..., torch.Tensor],
    method: str,
    schedule: str,
    steps: int,
    **options: Any,
) -> float:
    (sampler,) = (
        each
        for each in samplers.SAMPLERS.values()
        if each.method == method and each.schedule == schedule
    )
    noise = noises(3 * steps + 80)
    made = make_schedule(
        sampler.key, steps, alphas_cumprod(), "epsilon", Options(**options)
    )
    return relative_difference(
        sample(made, noise, stand_in), theirs(method, schedule, steps, noise, **options)
    )


#: Multistep methods of k-diffusion end with an error after a single step.
_OF_SEVERAL_STEPS = ("dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde")


def test_each_sampler_is_k_diffusions(theirs):
    found = {
        (method, steps): check(theirs, method, "karras", steps)
        for method in METHODS
        for steps in (1, 2, 4, 20)
        if steps > 1 or method not in _OF_SEVERAL_STEPS
    }
    # Heun's step from sigma 14.6 to 0.03 has 250 times the rounding of the latents, there and here.
    assert found.pop(("heun", 2)) < 3e-5
    assert too_different(found) == {}


@pytest.mark.parametrize("schedule", samplers.SCHEDULES)
def test_each_schedule_is_the_references(theirs, schedule: str):
    assert check(theirs, "euler_ancestral", schedule, 8) < 1e-5


@pytest.mark.parametrize(
    "schedule", sorted(set(samplers.SCHEDULES) - {"turbo"})
)  # Forge's
def test_a_schedule_in_half_precision_is_k_diffusions(schedule: str, k_diffusion):
    """As AUTOMATIC1111 drew before 1.7, whose model had its `alphas_cumprod` in float16 as well."""
    key = "euler" if schedule == "uniform" else f"euler_{schedule}"
    noise = noises(1)
    alphas = alphas_cumprod()
    made = make_schedule(key, 8, alphas, "epsilon", Options(is_downcast=True))
    found = sample(made, noise, stand_in)
    halved = references.Reference(k_diffusion, stand_in, alphas.float().half())
    assert (
        relative_difference(found, halved.draw("euler", schedule, 8, noise, {})) < 1e-5
    )
    assert (
        made.table - make_schedule(key, 8, alphas, "epsilon").table
    ).abs().max() > 1e-4


@pytest.mark.slow
def test_each_sampler_with_each_schedule_is_the_references(theirs):
    found = {
        method: too_different(
            {
                (schedule, steps): check(theirs, method, schedule, steps)
                for schedule in samplers.SCHEDULES
                for steps in STEP_COUNTS
            }
        )
        for method in METHODS
    }
    assert {method: worse for method, worse in found.items() if worse} == {}

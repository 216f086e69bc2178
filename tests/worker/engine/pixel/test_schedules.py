from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.pipelines import deepfloyd_if

from imagefleet import errors
from imagefleet.job.samplers import Options
from pixel import tiny_cascade
from worker.engine import sampler
from worker.engine.networks.transformer import SlotState
from worker.engine.pixel import schedules
from worker.engine.slots import step

pytestmark = pytest.mark.slow

CONFIG = {
    key: value
    for key, value in tiny_cascade.make_scheduler("base").config.items()
    if key != "_use_default_values"
}


def noise_schedule(**changes: Any) -> DDPMScheduler:
    return schedules.read_scheduler({**CONFIG, **changes}, "a stage")


def table(name: str, steps: int = 20, **changes: Any) -> torch.Tensor:
    return schedules.make_schedule(
        name, steps, noise_schedule(**changes), Options()
    ).table


@pytest.mark.parametrize("name", schedules.LISTS)
def test_the_named_lists_of_timesteps_are_those_of_diffusers(name: str):
    found = table(name)[:, sampler.TIMESTEP].tolist()
    assert found == getattr(deepfloyd_if, f"{name}_timesteps")


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_any_number_of_steps_is_spaced_as_diffusers_spaces_it(spacing: str):
    noise = noise_schedule(timestep_spacing=spacing)
    scheduler = DDPMScheduler(**{**CONFIG, "timestep_spacing": spacing})
    for steps in (1, 2, 7, 27, 50, 100, 333, 1000):
        scheduler.set_timesteps(steps)
        made = schedules.make_schedule(schedules.DDPM, steps, noise, Options())
        assert made.table[:, sampler.TIMESTEP].tolist() == scheduler.timesteps.tolist()
    assert noise.num_inference_steps is None, "shared by several threads"


@pytest.mark.parametrize("name", [schedules.DDPM, *schedules.LISTS])
def test_a_step_is_that_of_diffusers_scheduler(name: str):
    """Each step alone, from a random image, output and variance."""
    scheduler = tiny_cascade.make_scheduler("base")
    rows = table(name, 40)
    timesteps = rows[:, sampler.TIMESTEP].long().tolist()
    scheduler.set_timesteps(timesteps=timesteps)
    random = torch.Generator().manual_seed(0)
    for at, row in zip(timesteps, rows, strict=True):
        image, output, variance = torch.randn(3, 1, 3, 8, 8, generator=random)
        seed = torch.Generator().manual_seed(at)
        expected = scheduler.step(
            torch.cat([output, variance], dim=1), at, image, generator=seed
        ).prev_sample
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(at))
        found = run_step(row, image, output, variance, noise)
        assert torch.allclose(found, expected, rtol=1e-5, atol=2e-5), at


def run_step(
    row: torch.Tensor, image: Any, output: Any, variance: Any, noise: Any
) -> torch.Tensor:
    """One tick of one slot, with a UNet that gives this output for both prompts."""

    class Unet:
        dtype = torch.float32
        limit = staticmethod(schedules.limit_of(noise_schedule()))

        def __call__(self, *_: Any) -> torch.Tensor:
            return torch.cat([output, variance], dim=1).repeat(2, 1, 1, 1)

    history = torch.zeros(sampler.HISTORY, *image.shape)
    rows = torch.cat([row, torch.tensor([7.0])])[None]
    stepped = image.clone()
    nothing = torch.zeros_like(image)
    context = torch.zeros(2, 1, 1)
    state = SlotState(
        stepped, history, rows, noise, nothing, nothing, context, None, context, None
    )
    step.tick(Unet(), "shared", state, ())  # type: ignore[arg-type]
    return stepped


@pytest.mark.parametrize("scale", [0.2, 1.1, 3.0, 50.0])
def test_dynamic_thresholding_is_that_of_diffusers(scale: float):
    scheduler = tiny_cascade.make_scheduler("base")
    images = scale * torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    images[1] *= 10
    found = schedules.limit_of(noise_schedule())(images)
    assert torch.allclose(found, scheduler._threshold_sample(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ddim", "DDIM does not work on pixels"),
        ("plms", "PLMS does not work on pixels"),
        ("fast28", "unknown sampler 'fast28'"),
    ],
)
def test_what_cannot_be_sampled_is_refused(name: str, message: str):
    with pytest.raises(errors.JobError, match=message):
        table(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "PNDMScheduler"}, "has _class_name 'PNDMScheduler'"),
        ({"variance_type": "learned"}, "has variance_type 'learned'"),
        ({"prediction_type": "sample"}, "has prediction_type 'sample'"),
    ],
)
def test_a_scheduler_of_another_kind_is_refused(changes, message: str):
    with pytest.raises(errors.SetupError, match=message):
        noise_schedule(**changes)

"""The samplers of pixel stages, as tables with one row per UNet call (`engine.sampler`).

Beside the samplers of latent models that work on sigmas there are `ddpm` (Ho et al. 2020) with the
variance that the UNet has learned between the logarithms of its two bounds (Nichol and Dhariwal
2021, equation 15), at the timesteps of the checkpoint's scheduler or at one of DeepFloyd IF's lists
of them, in float32 in the order of diffusers' `DDPMScheduler`; and `edm`, the deterministic sampler
of Karras et al. (2022), algorithm 1: Heun's method, from sigma 80 to 0.002 or as far as the
checkpoint's table goes, at fractions of timesteps whose log sigma is interpolated.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from diffusers import DDPMScheduler
from diffusers.pipelines.deepfloyd_if import timesteps as named
from torch import Tensor

from imagefleet import errors
from imagefleet.job import samplers
from imagefleet.job.samplers import Options
from worker.engine import sampler
from worker.engine.sampler import Schedule
from worker.engine.samplers import by_sigma, schedule
from worker.engine.samplers.by_sigma import karras
from worker.engine.samplers.schedule import levels

DDPM, EDM = "ddpm", "edm"

#: DeepFloyd IF's lists of timesteps.
LISTS: Mapping[str, Sequence[int]] = {
    name.removesuffix("_timesteps"): value
    for name, value in vars(named).items()
    if name.endswith("_timesteps")
}

#: Karras et al. (2022), table 1: the largest and the smallest sigma.
_SIGMAS = (80.0, 0.002)

#: How the variance is found: learned between two bounds, or one of them.
_VARIANCES = ("learned_range", "fixed_small", "fixed_small_log", "fixed_large")

_PREDICTIONS = ("epsilon", "v_prediction")

#: diffusers' smallest variance, of which there is a logarithm.
_LEAST_VARIANCE = 1e-20


def read_scheduler(config: Mapping[str, object], name: str) -> DDPMScheduler:
    """The scheduler of a configuration; SetupError for another kind, prediction or variance."""
    if config.get("_class_name", "DDPMScheduler") != "DDPMScheduler":
        raise errors.SetupError(f"the scheduler of {name!r} is not a DDPMScheduler")
    scheduler = DDPMScheduler.from_config(dict(config))
    own = scheduler.config
    if own.variance_type not in _VARIANCES or own.prediction_type not in _PREDICTIONS:
        raise errors.SetupError(
            f"{name!r} has the variance {own.variance_type!r} and predicts"
            f" {own.prediction_type!r}; pixel stages may have {', '.join(_VARIANCES)}, and predict"
            f" {' or '.join(_PREDICTIONS)}"
        )
    return scheduler


def limit_of(
    scheduler: DDPMScheduler, values: int
) -> Callable[[Tensor], Tensor] | None:
    """Function that clips or thresholds an estimate of so many *values*; None for no limit."""
    own = scheduler.config
    if own.thresholding:
        # In float32, as by `torch.quantile`.
        share = torch.tensor(own.dynamic_thresholding_ratio)
        rank = float(share * (values - 1))
        return functools.partial(threshold, limit=own.sample_max_value, rank=rank)
    if own.clip_sample:
        most = own.clip_sample_range
        return functools.partial(torch.clamp, min=-most, max=most)
    return None


def make_schedule(
    name: str, steps: int, noise: DDPMScheduler, options: Options
) -> Schedule:
    """The schedule of a sampler by name.

    A list of timesteps has as many steps as it has. Raises JobError if there is no such sampler.
    """
    if name in LISTS:
        return _ddpm(list(LISTS[name]), noise)
    if name == DDPM:
        own = copy.copy(noise)  # it keeps the timesteps, and several threads ask
        own.set_timesteps(steps)
        return _ddpm(own.timesteps.tolist(), noise)
    if name == EDM:
        return _edm(steps, noise)
    known = samplers.SAMPLERS.get(name)
    if known is not None and not known.draws_pixels:
        raise errors.JobError(
            f"{known.title} does not work on pixels; use"
            f" {', '.join(samplers.titles(True))}"
        )
    return schedule.make_schedule(
        name,
        steps,
        noise.alphas_cumprod.double(),
        noise.config.prediction_type,
        options,
    )


def _ddpm(timesteps: Sequence[int], noise: DDPMScheduler) -> Schedule:
    rows = [
        _ddpm_row(at, following, noise)
        for at, following in zip(timesteps, [*timesteps[1:], -1], strict=True)
    ]
    return Schedule(1.0, torch.stack(rows), tuple(at > 0 for at in timesteps))


def _ddpm_row(at: int, following: int, noise: DDPMScheduler) -> Tensor:
    """Ho et al. (2020), equation 7, by `DDPMScheduler.step`, in float32 as there."""
    alphas = noise.alphas_cumprod
    alpha = alphas[at]
    next_alpha = alphas[following] if following >= 0 else torch.tensor(1.0)
    rest = 1 - alpha
    next_rest = 1 - next_alpha
    kept = alpha / next_alpha
    beta = 1 - kept
    row = torch.zeros(sampler.COLUMNS)
    row[sampler.TIMESTEP] = at
    row[sampler.INPUT_SCALE] = 1
    if noise.config.prediction_type == "epsilon":
        row[sampler.FROM_LATENTS] = 1 / alpha**0.5
        row[sampler.FROM_OUTPUT] = -(rest**0.5) / alpha**0.5
    else:
        row[sampler.FROM_LATENTS] = alpha**0.5
        row[sampler.FROM_OUTPUT] = -(rest**0.5)
    row[sampler.KEEP] = kept**0.5 * next_rest / rest
    row[sampler.FIRST_WEIGHT] = next_alpha**0.5 * beta / rest
    if at > 0:
        small = torch.clamp(next_rest / rest * beta, min=_LEAST_VARIANCE).log()
        large = beta.log()
        variance = noise.config.variance_type
        row[sampler.NOISE_SCALE] = 1
        row[sampler.SMALL_LOG] = large if variance == "fixed_large" else small
        row[sampler.LARGE_LOG] = small if variance.startswith("fixed_small") else large
    return row


def _edm(steps: int, noise: DDPMScheduler) -> Schedule:
    """Karras et al. (2022), equation 5, within the sigmas that the UNet knows; the last is 0."""
    known = levels(noise.alphas_cumprod)
    predicted = noise.config.prediction_type
    largest, smallest = known.ends
    ends = min(_SIGMAS[0], largest), max(_SIGMAS[1], smallest)
    sigmas = [*karras(*ends, steps).tolist(), 0.0]
    moves = by_sigma.make_moves("heun", sigmas, samplers.DEFAULT_OPTIONS)
    made = schedule.of_moves(samplers.SAMPLERS["heun"], moves, known, predicted)
    return replace(made, initial_scale=sigmas[0])


def threshold(images: Tensor, limit: float, rank: float) -> Tensor:
    """Images [batch, 3, height, width] within -1 and 1 by dynamic thresholding.

    Saharia et al. (2022), section 2.3: clamped to the absolute value of *rank* among them,
    but between 1 and *limit*, and divided by it.
    """
    sizes = images.flatten(1).abs().sort(dim=1).values
    below = int(rank)
    above = min(below + 1, sizes.shape[1] - 1)
    low = sizes[:, below]
    high = sizes[:, above]
    scale = torch.lerp(low, high, rank - below)
    scale = scale.clamp(min=1, max=limit)[:, None, None, None]
    return images.clamp(-scale, scale) / scale

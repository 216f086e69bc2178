"""The samplers of pixel stages, as tables with one row per UNet call (`engine.sampler`).

Beside the samplers of latent models that work on sigmas there are `ddpm` (Ho et al. 2020) with the
variance that the UNet has learned between the logarithms of its two bounds (Nichol and Dhariwal
2021, equation 15), at the timesteps of the checkpoint's scheduler or at one of DeepFloyd IF's lists
of them, in float32 in the order of diffusers' `DDPMScheduler`; and `edm`, the deterministic sampler
of Karras et al. (2022), algorithm 1: Heun's method, from sigma 80 to 0.002 or as far as the
checkpoint's table goes, at fractions of timesteps whose log sigma is interpolated.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from diffusers import DDPMScheduler
from diffusers.pipelines.deepfloyd_if import timesteps as named

from imagefleet import errors
from imagefleet.job import samplers
from imagefleet.job.samplers import Options
from worker.engine import sampler
from worker.engine.sampler import Schedule
from worker.engine.samplers import by_sigma, schedule
from worker.engine.samplers.by_sigma import karras
from worker.engine.samplers.schedule import levels

#: The columns after the sampler's own: the logarithms of the variance's bounds.
SMALL_LOG, LARGE_LOG = sampler.COLUMNS, sampler.COLUMNS + 1
COLUMNS = sampler.COLUMNS + 2

DDPM, EDM = "ddpm", "edm"

#: DeepFloyd IF's lists of timesteps.
LISTS: Mapping[str, Sequence[int]] = {
    name.removesuffix("_timesteps"): value
    for name, value in vars(named).items()
    if name.endswith("_timesteps")
}

#: Karras et al. (2022), table 1: the largest and the smallest sigma.
_SIGMAS = (80.0, 0.002)

_HEUN = "heun"

#: How the variance is found: learned between two bounds, or one of them.
_VARIANCES = ("learned_range", "fixed_small", "fixed_small_log", "fixed_large")

_PREDICTIONS = ("epsilon", "v_prediction")

#: diffusers' smallest variance, of which there is a logarithm.
_LEAST_VARIANCE = 1e-20


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """A stage's noise schedule, and what its estimates of the image are limited to."""

    scheduler: DDPMScheduler
    prediction_type: str
    limit: float | None
    """The largest value of an estimate; None for no limit."""
    quantile: float | None
    """The share of an estimate's values that are within its scale (dynamic thresholding)."""

    @property
    def alphas_cumprod(self) -> torch.Tensor:
        """[train timesteps] in float32."""
        found: torch.Tensor = self.scheduler.alphas_cumprod
        return found

    def limit_of(self, values: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What limits an estimate of so many *values*; None for no limit."""
        if self.limit is None:
            return None
        rank = None if self.quantile is None else find_rank(self.quantile, values)
        return functools.partial(threshold, limit=self.limit, rank=rank)


def read_scheduler(config: Mapping[str, object], name: str) -> NoiseSchedule:
    """The schedule of a `scheduler_config.json`.

    Raises SetupError if it is not one of DDPM, or of another prediction or variance.
    """
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
    limit: float | None = None
    if own.thresholding:
        limit = float(own.sample_max_value)
    elif own.clip_sample:
        limit = float(own.clip_sample_range)
    quantile = float(own.dynamic_thresholding_ratio) if own.thresholding else None
    return NoiseSchedule(scheduler, own.prediction_type, limit, quantile)


def make_schedule(name: str, steps: int, noise: NoiseSchedule, options: Options) -> Schedule:
    """The schedule of a sampler by name; its table is [calls, COLUMNS].

    A list of timesteps has as many steps as it has. Raises JobError if there is no such sampler, or
    it cannot take so many steps.
    """
    if name in LISTS:
        return _ddpm(list(LISTS[name]), noise)
    if name == DDPM:
        return _ddpm(spaced(noise.scheduler, steps), noise)
    if name == EDM:
        return _edm(steps, noise)
    if name in samplers.SAMPLERS and samplers.SAMPLERS[name].title not in samplers.titles(True):
        raise errors.JobError(
            f"{samplers.SAMPLERS[name].title} does not work on pixels; use"
            f" {', '.join(samplers.titles(True))}"
        )
    made = schedule.make_schedule(
        name, steps, noise.alphas_cumprod.double(), noise.prediction_type, options
    )
    return _widened(made)


def spaced(scheduler: DDPMScheduler, steps: int) -> list[int]:
    """The timesteps of so many steps, as the scheduler's configuration spaces them.

    Raises JobError if there are not so many.
    """
    most = int(scheduler.config.num_train_timesteps)
    if not 1 <= steps <= most:
        raise errors.JobError(f"steps is {steps}; DDPM takes 1 to {most} with this model")
    own = copy.copy(scheduler)  # it keeps the timesteps, and several threads ask
    own.set_timesteps(steps)
    found: list[int] = own.timesteps.tolist()
    return found


def _ddpm(timesteps: Sequence[int], noise: NoiseSchedule) -> Schedule:
    rows = [
        _ddpm_row(at, following, noise)
        for at, following in zip(timesteps, [*timesteps[1:], -1], strict=True)
    ]
    noisy = tuple(at > 0 for at in timesteps)
    return Schedule(1.0, torch.stack(rows), noisy)


def _ddpm_row(at: int, following: int, noise: NoiseSchedule) -> torch.Tensor:
    """Ho et al. (2020), equation 7, by `DDPMScheduler.step`, in float32 as there."""
    alphas = noise.alphas_cumprod
    alpha = alphas[at]
    next_alpha = alphas[following] if following >= 0 else torch.tensor(1.0)
    rest, next_rest = 1 - alpha, 1 - next_alpha
    kept = alpha / next_alpha
    beta = 1 - kept
    row = torch.zeros(COLUMNS)
    row[sampler.TIMESTEP] = at
    row[sampler.INPUT_SCALE] = 1
    if noise.prediction_type == "epsilon":
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
        variance = noise.scheduler.config.variance_type
        row[sampler.NOISE_SCALE] = 1
        row[SMALL_LOG] = large if variance == "fixed_large" else small
        row[LARGE_LOG] = small if variance.startswith("fixed_small") else large
    return row


def edm_sigmas(steps: int, alphas_cumprod: torch.Tensor) -> list[float]:
    """Karras et al. (2022), equation 5, within the sigmas that the UNet knows; the last is 0."""
    largest, smallest = levels(alphas_cumprod).ends
    ends = min(_SIGMAS[0], largest), max(_SIGMAS[1], smallest)
    return [*karras(*ends, steps).tolist(), 0.0]


def _edm(steps: int, noise: NoiseSchedule) -> Schedule:
    sigmas = edm_sigmas(steps, noise.alphas_cumprod)
    moves = list(by_sigma.SAMPLERS[_HEUN](sigmas, samplers.DEFAULT_OPTIONS))
    known = levels(noise.alphas_cumprod)
    made = schedule.of_moves(_HEUN, moves, known, noise.prediction_type)
    return _widened(replace(made, initial_scale=sigmas[0]))


def _widened(made: Schedule) -> Schedule:
    """With the variance's columns, which only DDPM has."""
    zeros = torch.zeros(len(made.table), COLUMNS - sampler.COLUMNS)
    return replace(made, table=torch.cat([made.table, zeros], dim=1))


def threshold(images: torch.Tensor, limit: float, rank: float | None) -> torch.Tensor:
    """Images [batch, 3, height, width] within -1 and 1 by dynamic thresholding.

    Saharia et al. (2022), section 2.3: clamped to the absolute value of *rank* (`find_rank`), but
    between 1 and *limit*, and divided by it. Without a *rank*, clamped to *limit*.
    """
    if rank is None:
        return images.clamp(-limit, limit)
    sizes = images.flatten(1).abs().sort(dim=1).values
    below = int(rank)
    above = min(below + 1, sizes.shape[1] - 1)
    scale = torch.lerp(sizes[:, below], sizes[:, above], rank - below)
    scale = scale.clamp(min=1, max=limit)[:, None, None, None]
    return images.clamp(-scale, scale) / scale


def find_rank(quantile: float, count: int) -> float:
    """The rank at which a quantile of *count* sorted values is, between two of them.

    In float32, as `torch.quantile` computes it at each call.
    """
    return float(torch.tensor(quantile, dtype=torch.float32) * (count - 1))

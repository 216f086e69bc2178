"""The samplers of pixel stages, as tables with one row per UNet call (`engine.sampler`).

Beside the samplers of latent models that work on sigmas there is `ddpm` (Ho et al. 2020) with the
variance that the UNet has learned between the logarithms of its two bounds (Nichol and Dhariwal
2021, equation 15), at the timesteps of the checkpoint's scheduler or at one of DeepFloyd IF's lists
of them, in float32 in the order of diffusers' `DDPMScheduler`.
"""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from diffusers import DDPMScheduler
from diffusers.pipelines.deepfloyd_if import timesteps as named
from torch import Tensor

from imagefleet.errors import JobError, SetupError
from imagefleet.job import samplers
from imagefleet.job.samplers import Options
from imagefleet.validation import JSONObject
from worker.engine.sampler import ESTIMATES, LATENTS, Limit, Move, Schedule
from worker.engine.samplers import schedule

DDPM = "ddpm"

#: DeepFloyd IF's lists of timesteps.
LISTS: Mapping[str, Sequence[int]] = {
    name.removesuffix("_timesteps"): value
    for name, value in vars(named).items()
    if name.endswith("_timesteps")
}

#: The schedulers of pixel stages: their UNets predict the variance between two bounds, as
#: DeepFloyd IF's do.
_KNOWN: Mapping[str, Sequence[str]] = {
    "_class_name": ["DDPMScheduler"],
    "prediction_type": ["epsilon", "v_prediction"],
    "variance_type": ["learned_range"],
}

#: diffusers' smallest variance, of which there is a logarithm.
_LEAST_VARIANCE = 1e-20


def read_scheduler(config: JSONObject, name: str) -> DDPMScheduler:
    """The scheduler of a configuration; SetupError for a kind that is not known."""
    scheduler = DDPMScheduler.from_config(dict(config))
    own = {"_class_name": "DDPMScheduler", **scheduler.config, **config}
    for key, known in _KNOWN.items():
        if (found := own[key]) not in known:
            raise SetupError(
                f"the scheduler of {name!r} has {key} {found!r}; pixel stages may have"
                f" {' or '.join(known)}"
            )
    return scheduler


def limit_of(scheduler: DDPMScheduler) -> Limit | None:
    """Function that clips or thresholds an estimate; None for no limit."""
    own = scheduler.config
    if own.thresholding:
        return functools.partial(
            threshold,
            limit=own.sample_max_value,
            share=own.dynamic_thresholding_ratio,
        )
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
    known = samplers.SAMPLERS.get(name)
    if known is not None and not known.draws_pixels:
        raise JobError(
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
    moves = [
        _ddpm_move(at, following, noise) for at, following in pairwise([*timesteps, -1])
    ]
    return replace(
        schedule.tabulate(moves, samplers.DEFAULT_OPTIONS), initial_scale=1.0
    )


def _ddpm_move(at: int, following: int, noise: DDPMScheduler) -> Move:
    """Ho et al. (2020), equation 7, by `DDPMScheduler.step`, in float32 as there."""
    alphas = noise.alphas_cumprod
    alpha = alphas[at]
    next_alpha = alphas[following] if following >= 0 else torch.tensor(1.0)
    rest = 1 - alpha
    next_rest = 1 - next_alpha
    kept = alpha / next_alpha
    beta = 1 - kept
    keep = float(kept**0.5 * next_rest / rest)
    gain = float(next_alpha**0.5 * beta / rest)
    estimate = float(1 / alpha**0.5), float(-(rest**0.5) / alpha**0.5)
    if noise.config.prediction_type == "v_prediction":
        estimate = float(alpha**0.5), float(-(rest**0.5))
    move = Move(at, keep * LATENTS + gain * ESTIMATES[0], estimate=estimate)
    if at == 0:
        return move
    small = torch.clamp(next_rest / rest * beta, min=_LEAST_VARIANCE).log()
    return move._replace(noise=1.0, variance_logs=(float(small), float(beta.log())))


def threshold(images: Tensor, limit: float, share: float) -> Tensor:
    """Images [batch, 3, height, width] within -1 and 1 by dynamic thresholding.

    Saharia et al. (2022), section 2.3: clamped to the quantile *share* of the absolute values, but
    between 1 and *limit*, and divided by it.
    """
    # torch.quantile looks at its numbers, which not every torch compiles.
    sizes = images.flatten(1).abs().sort(dim=1).values
    rank = share * (sizes.shape[1] - 1)
    below = math.floor(rank)
    above = math.ceil(rank)
    scale = torch.lerp(sizes[:, below], sizes[:, above], rank - below)
    scale = scale.clamp(min=1, max=limit)[:, None, None, None]
    return images.clamp(-scale, scale) / scale

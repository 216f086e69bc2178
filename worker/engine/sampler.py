"""The samplers, as tables of coefficients with one row per UNet call.

Every sampler here is linear in the latents, the UNet's output, earlier estimates and fresh noise.
So one update serves all rows of a batch, whatever each row's sampler and step:

    output   = unet(input_scale * latents, timestep)
    estimate = from_latents * latents + from_output * output
    latents  = keep * latents + noise_scale * noise + weights . [estimate, earlier estimates]

Inpainting keeps a part of the latents, as AUTOMATIC1111's `CFGDenoiser` does: of the estimate where
that is the image, and of what the UNet sees where it is the noise.

Euler, Euler ancestral and DPM++ 2M follow k-diffusion (`sampling.py`): latents have variance
sigma^2 + 1, and the estimate is the denoised image. Sigmas belong to evenly spaced timesteps, with
log sigma interpolated (`external.py`), or are Karras et al.'s. DDIM and PLMS follow AUTOMATIC1111:
latents have variance 1, and the estimate is the noise. Their timesteps are 1, 1 + r, 1 + 2r, ...
below 1000 with r = 1000 // steps, of which the last takes no step; PLMS calls the UNet twice at the
second one. img2img takes the end of a schedule (`t_enc`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from imagefleet import errors
from imagefleet.job import samplers
from imagefleet.job.samplers import Options

#: Estimates that an update weighs, newest first: PLMS uses four, and skips one it has replaced.
HISTORY = 5

#: The columns of a schedule's table; HISTORY weights start at the last one.
(
    TIMESTEP,
    INPUT_SCALE,
    FROM_LATENTS,
    FROM_OUTPUT,
    KEEP,
    NOISE_SCALE,
    MASKS_INPUT,
    FIRST_WEIGHT,
) = range(8)

#: The number of columns.
COLUMNS = FIRST_WEIGHT + HISTORY

#: Karras et al. (2022), table 1.
_RHO = 7.0

#: The weights of the Adams-Bashforth methods of orders 1 to 4, newest first.
_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One image's coefficients, one row per UNet call."""

    initial_scale: float
    """Standard deviation of the first latents."""
    table: torch.Tensor
    """[calls, COLUMNS] in float32."""
    noisy: tuple[bool, ...]
    """True for calls that use noise; for others none may be drawn, or later noise would change."""
    initial_churn: float | None = None
    """Standard deviation of more noise for the first latents; None if none may be drawn."""
    unguided: tuple[bool, ...] = ()
    """True for calls that take the prompt's output alone, without guidance; () for none."""
    image_scale: float = 0.0
    """What the first latents have of an image's; 0 where they are noise alone."""


def make_schedule(
    name: str,
    steps: int,
    alphas_cumprod: torch.Tensor,
    prediction_type: str,
    options: Options = samplers.DEFAULT_OPTIONS,
    *,
    t_enc: int | None = None,
) -> Schedule:
    """The schedule of one of `imagefleet.job.samplers`, by its name, such as "dpmpp_2m_karras".

    DDIM and PLMS may make more UNet calls than *steps*; *alphas_cumprod* [train timesteps] is the
    model's noise schedule in float64. *t_enc*: for the end of the schedule alone, on an image's
    latents: AUTOMATIC1111's number of the step, from the end, whose noise they have. Where no step
    is left, one call leaves the latents as they are. Raises JobError if there is no such sampler,
    or it has no step to take.
    """
    alphas = alphas_cumprod.double().numpy()
    initial_scale, initial_churn = 1.0, None
    image_scale = 0.0 if t_enc is None else 1.0
    kind = name.removesuffix("_karras")
    if kind in _SIGMA_UPDATES:
        all_sigmas = np.sqrt((1 - alphas) / alphas)
        if kind == name:
            sigmas = [*_even_sigmas(all_sigmas, steps).tolist(), 0.0]
        else:
            sigmas = karras_sigmas(all_sigmas[-1], all_sigmas[0], steps)
        if t_enc is not None:
            sigmas = sigmas[steps - t_enc - 1 :]
        initial_scale = sigmas[0]
        churned = sigmas
        if kind == "euler" and options.s_churn > 0:
            taken = max(1, len(sigmas) - 1)
            churned = [_churned(sigma, taken, options) for sigma in sigmas]
            initial_churn = _churn_noise(sigmas[0], churned[0], options)
        update_of = _SIGMA_UPDATES[kind]
        levels = churned[:-1]
        calls: Iterable[_Call] = (
            (
                float(np.interp(math.log(sigma), np.log(all_sigmas), np.arange(len(alphas)))),
                1 / math.sqrt(sigma**2 + 1),
                to_image(sigma, prediction_type),
                update_of(sigmas, churned, at, options),
            )
            for at, sigma in enumerate(levels)
        )
    elif name in _TIMESTEP_UPDATES:
        timesteps = _timesteps(steps, alphas) if steps else []
        if t_enc is not None and timesteps:
            alpha = alphas[timesteps[-1 - t_enc]]
            image_scale, initial_scale = math.sqrt(alpha), math.sqrt(1 - alpha)
            timesteps = timesteps[len(timesteps) - t_enc :]
        elif t_enc is not None:
            initial_scale = 0.0
        updates = list(_TIMESTEP_UPDATES[name](timesteps, alphas, options))
        if not updates and t_enc is None:
            raise errors.JobError(samplers.too_few_steps(name))
        levels = [float(timestep) for timestep, _ in updates]
        calls = (
            (timestep, 1.0, _to_noise(alphas[timestep], prediction_type), update)
            for timestep, update in updates
        )
    else:
        known = ", ".join([*_SIGMA_UPDATES, *_TIMESTEP_UPDATES])
        raise errors.JobError(f"unknown sampler {name!r}; this engine has only {known}")
    rows, noisy = _table(calls if levels else [_NO_STEP], masks_input=name in _TIMESTEP_UPDATES)
    return Schedule(
        initial_scale,
        torch.tensor(rows, dtype=torch.float32),
        noisy,
        initial_churn,
        _unguided(levels, options.s_min_uncond),
        image_scale,
    )


class Inpainting(NamedTuple):
    """What stays of each image of a batch while the rest is drawn anew."""

    kept: torch.Tensor
    """[batch, 1, height, width]: 1 where the original stays, 0 elsewhere."""
    original: torch.Tensor
    """The latents that it began with, without noise [batch, 4, height, width]."""


def mask_input(rows: torch.Tensor, latents: torch.Tensor, image: Inpainting) -> torch.Tensor:
    """The latents that the UNet sees: the original's where DDIM and PLMS keep it."""
    kept = rows[:, MASKS_INPUT, None, None, None] * image.kept
    return latents * (1 - kept) + image.original * kept


def restore(latents: torch.Tensor, image: Inpainting) -> torch.Tensor:
    """Drawn latents with what an image keeps, of one image or a batch."""
    return latents * (1 - image.kept) + image.original * image.kept


def scale_input(rows: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The UNet's input for latents [batch, 4, height, width] and table rows [batch, COLUMNS]."""
    return latents * rows[:, INPUT_SCALE, None, None, None]


def step(
    rows: torch.Tensor,
    latents: torch.Tensor,
    output: torch.Tensor,
    history: torch.Tensor,
    noise: torch.Tensor | None,
    image: Inpainting | None = None,
    limit: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of a batch: the next latents and history.

    A row that restarts needs zeros in *history*: its weights are 0, but 0 times NaN is NaN.

    *rows* are of each image's table [batch, COLUMNS], *history* earlier estimates, newest first
    [HISTORY, batch, 4, height, width]; latents, the UNet's *output* with guidance and *noise* are
    [batch, 4, height, width]. Noise is None if no row uses any, *image* if none keeps anything.
    *limit* is what estimates are limited by, if by anything.
    """
    columns = rows.T[..., None, None, None]
    seen = latents if image is None else mask_input(rows, latents, image)
    estimate = columns[FROM_LATENTS] * seen + columns[FROM_OUTPUT] * output
    if limit is not None:
        estimate = limit(estimate)
    if image is not None:
        kept = (1 - columns[MASKS_INPUT]) * image.kept
        estimate = estimate * (1 - kept) + image.original * kept
    history = torch.cat([estimate[None], history[:-1]])
    stepped = columns[KEEP] * latents + (columns[FIRST_WEIGHT:] * history).sum(dim=0)
    if noise is not None:
        stepped += columns[NOISE_SCALE] * noise
    return stepped, history


#: keep, weights (newest estimate first), noise_scale; None if no noise is drawn.
_Update = tuple[float, Sequence[float], float | None]
#: timestep, input_scale, the estimate's coefficients, the update.
_Call = tuple[float, float, tuple[float, float], _Update]
_Alphas = npt.NDArray[np.float64]

#: Latents stay as they are.
_NO_STEP: _Call = (0.0, 1.0, (0.0, 0.0), (1.0, (), None))


def _table(
    calls: Iterable[_Call], *, masks_input: bool
) -> tuple[list[list[float]], tuple[bool, ...]]:
    """The table's rows, and which of them draw noise."""
    rows, noisy, masks = [], [], float(masks_input)
    for timestep, input_scale, estimate, (keep, weights, noise_scale) in calls:
        padding = [0.0] * (HISTORY - len(weights))
        scale = noise_scale or 0.0
        rows.append([timestep, input_scale, *estimate, keep, scale, masks, *weights, *padding])
        noisy.append(noise_scale is not None)
    return rows, tuple(noisy)


def _unguided(levels: Sequence[float], s_min_uncond: float) -> tuple[bool, ...]:
    """AUTOMATIC1111's "negative guidance minimum sigma": every other call below it.

    Its timestep samplers compare their timesteps with it.
    """
    if s_min_uncond <= 0:
        return ()
    return tuple(call % 2 == 1 and level < s_min_uncond for call, level in enumerate(levels))


def _even_sigmas(all_sigmas: _Alphas, steps: int) -> _Alphas:
    timesteps = np.linspace(len(all_sigmas) - 1, 0, steps)
    return np.exp(np.interp(timesteps, np.arange(len(all_sigmas)), np.log(all_sigmas)))


def karras_sigmas(largest: float, smallest: float, steps: int) -> list[float]:
    """Karras et al. (2022), equation 5; the last is 0."""
    roots = np.linspace(largest ** (1 / _RHO), smallest ** (1 / _RHO), steps)
    return [*(roots**_RHO).tolist(), 0.0]


def to_image(sigma: float, prediction_type: str) -> tuple[float, float]:
    """Coefficients of latents and output in the denoised image."""
    if prediction_type == "v_prediction":
        return 1 / (sigma**2 + 1), -sigma / math.sqrt(sigma**2 + 1)
    return 1.0, -sigma


def _to_noise(alpha: float, prediction_type: str) -> tuple[float, float]:
    """Coefficients of latents and output in the noise."""
    if prediction_type == "v_prediction":
        return math.sqrt(1 - alpha), math.sqrt(alpha)
    return 0.0, 1.0


def _churned(sigma: float, steps: int, options: Options) -> float:
    """The sigma that a step starts from after its churn (Karras et al. 2022, algorithm 2)."""
    if not options.s_tmin <= sigma <= options.s_tmax:
        return sigma
    return sigma * (1 + min(options.s_churn / steps, math.sqrt(2) - 1))


def _churn_noise(sigma: float, churned: float, options: Options) -> float:
    return options.s_noise * math.sqrt(churned**2 - sigma**2)


def _euler(sigmas: Sequence[float], churned: Sequence[float], at: int, options: Options) -> _Update:
    """The noise is the churn of the following step, which k-diffusion draws at each."""
    following = sigmas[at + 1]
    ratio = following / churned[at]
    has_noise = options.s_churn > 0 and following > 0
    noise = _churn_noise(following, churned[at + 1], options) if has_noise else None
    return ratio, (1 - ratio,), noise


def _euler_ancestral(
    sigmas: Sequence[float], _: Sequence[float], at: int, options: Options
) -> _Update:
    """Steps down past the next sigma, then adds noise back up to it; none at the last step.

    AUTOMATIC1111 does not pass `s_noise` on to it.
    """
    sigma, following = sigmas[at], sigmas[at + 1]
    eta = 1.0 if options.eta is None else options.eta
    noise = min(following, eta * following * math.sqrt(1 - (following / sigma) ** 2))
    ratio = math.sqrt(following**2 - noise**2) / sigma
    return ratio, (1 - ratio,), noise or None


def _dpmpp_2m(sigmas: Sequence[float], _: Sequence[float], at: int, __: Options) -> _Update:
    """First order at the first step, without an earlier estimate, and at the last, to sigma 0."""
    sigma, following = sigmas[at], sigmas[at + 1]
    ratio = following / sigma
    if at == 0 or following == 0:
        return ratio, (1 - ratio,), None
    earlier = (1 - ratio) * math.log(sigma / following) / (2 * math.log(sigmas[at - 1] / sigma))
    return ratio, (1 - ratio + earlier, -earlier), None


def _ddim(
    timesteps: Sequence[int], alphas: _Alphas, options: Options
) -> Iterator[tuple[int, _Update]]:
    eta = options.eta or 0.0
    for timestep, following in pairwise(timesteps):
        alpha, next_alpha = alphas[timestep], alphas[following]
        variance = (1 - next_alpha) / (1 - alpha) * (1 - alpha / next_alpha)
        noise = eta * math.sqrt(variance)
        keep, gain = _transfer(alpha, next_alpha, noise)
        yield timestep, (keep, (gain,), noise if eta else None)


def _plms(timesteps: Sequence[int], alphas: _Alphas, _: Options) -> Iterator[tuple[int, _Update]]:
    """The first step is repeated with the mean of the estimates at both of its ends."""
    for at, (timestep, following) in enumerate(pairwise(timesteps)):
        keep, gain = _transfer(alphas[timestep], alphas[following])
        order = min(at, len(_ADAMS_BASHFORTH) - 1)
        weights = [gain * weight for weight in _ADAMS_BASHFORTH[order]]
        if at > 0:
            weights.insert(at, 0.0)  # the estimate that only the repeated step uses
        yield timestep, (keep, weights, None)
        if at == 0:
            yield following, (1.0, (gain / 2, -gain / 2), None)


def _timesteps(steps: int, alphas: _Alphas) -> list[int]:
    """The timestep of each step, and of the last one's result."""
    last = len(alphas) - 1
    return [min(1 + at, last) for at in reversed(range(0, len(alphas), len(alphas) // steps))]


def _transfer(alpha: float, following: float, noise: float = 0.0) -> tuple[float, float]:
    """Coefficients of latents and noise in the next latents (Song et al. 2021, equation 12).

    *noise* is the standard deviation of fresh noise in them.
    """
    keep = math.sqrt(following / alpha)
    return keep, math.sqrt(max(0.0, 1 - following - noise**2)) - keep * math.sqrt(1 - alpha)


#: Makes a step's update from the sigmas, the sigmas after churn, the step and the options.
_SIGMA_UPDATES: Mapping[
    str, Callable[[Sequence[float], Sequence[float], int, Options], _Update]
] = {"euler_ancestral": _euler_ancestral, "euler": _euler, "dpmpp_2m": _dpmpp_2m}

#: The timestep and the update of each call, from the timesteps, the last of which is the end.
_TIMESTEP_UPDATES: Mapping[
    str, Callable[[Sequence[int], _Alphas, Options], Iterator[tuple[int, _Update]]]
] = {"ddim": _ddim, "plms": _plms}

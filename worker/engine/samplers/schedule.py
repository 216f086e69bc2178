"""The schedule of a job's sampler: its moves as rows of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from imagefleet import errors
from imagefleet.job import samplers
from imagefleet.job.samplers import Options, Sampler
from worker.engine.sampler import BrownianNoise, Schedule
from worker.engine.samplers import by_sigma, by_timestep
from worker.engine.samplers import sigmas as schedules
from worker.engine.samplers.adaptive import Try
from worker.engine.samplers.moves import LATENTS, Move
from worker.engine.samplers.sigmas import Levels

#: DDIM CFG++ takes AUTOMATIC1111's scales from 0 to 12.5 as shares of 1.
_CFGPP_SHARE = 1 / 12.5

#: LCM's boundary conditions (Luo et al. 2023): sigma_data, and the scale of timesteps.
_LCM_DATA, _LCM_SCALE = 0.5, 10.0


class _Call(NamedTuple):
    """One row: a move, how the UNet is called, and what is made of its output."""

    timestep: float
    input_scale: float
    estimate: tuple[float, float]
    move: Move
    kept: tuple[float, float] = (1.0, 0.0)
    """What the estimate is where an inpainting keeps the original: of it, and of the latents."""


#: Latents stay as they are.
_NO_STEP = _Call(0.0, 1.0, (0.0, 0.0), Move(0.0, LATENTS))


def make_schedule(
    name: str,
    steps: int,
    alphas_cumprod: torch.Tensor,
    prediction_type: str,
    options: Options = samplers.DEFAULT_OPTIONS,
    *,
    t_enc: int | None = None,
    is_xl: bool = False,
) -> Schedule:
    """The schedule of one of `imagefleet.job.samplers`, by its key, such as "dpmpp_2m_karras".

    Some make more UNet calls than *steps*; *alphas_cumprod* [train timesteps] is the model's noise
    schedule in float64. *t_enc*: for the end of the schedule alone, on an image's latents:
    AUTOMATIC1111's number of the step, from the end, whose noise they have. Where no step is left,
    one call leaves the latents as they are. *is_xl*: a model of SDXL's kind, which has steps of its
    own in "Align Your Steps". Raises JobError if there is no such sampler, or it has no step to
    take.
    """
    sampler = samplers.SAMPLERS.get(name)
    if sampler is None:
        raise errors.JobError(samplers.unknown(name))
    if sampler.schedule is not None:
        known = schedules.levels(alphas_cumprod, is_xl=is_xl)
        return _of_sigmas(sampler, steps, known, prediction_type, options, t_enc)
    start, moves = by_timestep.Start(1.0, 0.0), []
    if steps:
        alphas = alphas_cumprod.double().numpy()
        start, path = by_timestep.make_path(
            sampler.method, steps, t_enc, alphas, prediction_type, options
        )
        moves = list(path)
    if not moves and t_enc is None:
        raise errors.JobError(samplers.too_few_steps(name))
    calls = [_Call(move.level, 1.0, move.estimate, move) for move in moves]
    made = _tabulate(calls, options, masks_input=True)
    share = _CFGPP_SHARE if sampler.method == "ddim_cfgpp" else 1.0
    return replace(
        made,
        initial_scale=start.noise_scale,
        image_scale=start.image_scale,
        guidance_share=share,
    )


def _of_sigmas(
    sampler: Sampler,
    steps: int,
    known: Levels,
    prediction_type: str,
    options: Options,
    t_enc: int | None,
) -> Schedule:
    method, schedule = sampler.method, sampler.schedule or "uniform"
    if method == "lcm" and schedule != "turbo":  # whose timesteps are those of DMD2, not LCM's
        known = schedules.of_lcm(known)
    leaves_out = steps > 0 and method in by_sigma.WITHOUT_NEXT_TO_LAST
    whole = schedules.make_sigmas(schedule, known, steps + leaves_out)
    if leaves_out:
        del whole[-2]
    sigmas = whole if t_enc is None else whole[steps - t_enc - 1 :]
    count = steps if t_enc is None else len(sigmas) - 1
    # Two take steps of their own between the ends, which are the schedule's with an image alone.
    ends = known.ends if t_enc is None else (sigmas[0], sigmas[max(-2, -len(sigmas))])
    moves: list[Move] = []
    if method not in ("dpm_fast", "dpm_adaptive"):
        moves = list(by_sigma.SAMPLERS[method](sigmas, options))
    elif method == "dpm_fast" and count > 0:
        moves = list(by_sigma.dpm_fast(*ends, count, options))
    made = of_moves(method, moves, known, prediction_type, options)
    if method == "dpm_adaptive" and count > 0 and ends[0] > ends[1]:
        made = _of_tries(Try(*ends, options), (), known, prediction_type)
    churn = None
    if method in by_sigma.WITH_CHURN and options.s_churn > 0:
        churn = by_sigma.churn_noise(sigmas[0], by_sigma.churned(sigmas, options)[0], options)
    intervals = tuple(move.interval for move in moves if move.noise is not None and move.interval)
    brownian = None
    if intervals:
        brownian = BrownianNoise((min(filter(None, whole)), max(whole)), intervals)
    return replace(
        made,
        initial_scale=sigmas[0],
        image_scale=0.0 if t_enc is None else 1.0,
        initial_churn=churn,
        brownian=brownian,
    )


def _of_tries(
    attempt: Try, before: Sequence[_Call], known: Levels, prediction_type: str
) -> Schedule:
    """The calls before a try and its own; the schedule is extended by the next one."""
    own = [_call_of("dpm_adaptive", move, known, prediction_type) for move in attempt.moves()]
    calls = [*before, *own]
    made = _tabulate(calls, attempt.options)

    def extend(
        latents: torch.Tensor, history: torch.Tensor, draw: Callable[[torch.Tensor], None]
    ) -> Schedule:
        following = attempt.finish(latents, history, draw)
        return made if following.is_done else _of_tries(following, calls, known, prediction_type)

    return replace(made, extend=extend)


def of_moves(
    method: str,
    moves: Sequence[Move],
    known: Levels,
    prediction_type: str,
    options: Options = samplers.DEFAULT_OPTIONS,
) -> Schedule:
    """The table of a sampler's moves between sigmas; the first latents are left to the caller."""
    calls = [_call_of(method, move, known, prediction_type) for move in moves]
    return _tabulate(calls, options)


def _call_of(method: str, move: Move, known: Levels, prediction_type: str) -> _Call:
    sigma = move.level
    timestep, input_scale = known.timestep(sigma), 1 / math.sqrt(sigma**2 + 1)
    from_latents, from_output = to_image(sigma, prediction_type)
    if method == "lms":
        estimate, kept = ((1 - from_latents) / sigma, -from_output / sigma), (-1 / sigma, 1 / sigma)
        return _Call(timestep, input_scale, estimate, move, kept)
    if method == "lcm":
        size = math.hypot(_LCM_SCALE * timestep, _LCM_DATA)
        image, skipped = _LCM_SCALE * timestep / size, (_LCM_DATA / size) ** 2
        from_latents, from_output = image * from_latents + skipped, image * from_output
    return _Call(timestep, input_scale, (from_latents, from_output), move)


def to_image(sigma: float, prediction_type: str) -> tuple[float, float]:
    """Coefficients of latents and output in the denoised image."""
    if prediction_type == "v_prediction":
        return 1 / (sigma**2 + 1), -sigma / math.sqrt(sigma**2 + 1)
    return 1.0, -sigma


def _tabulate(calls: Sequence[_Call], options: Options, *, masks_input: bool = False) -> Schedule:
    """The table of calls; the first latents are left to others."""
    rows = []
    for timestep, input_scale, estimate, move, kept in calls or [_NO_STEP]:
        keep, *weights = move.latents
        rest = (float(masks_input), move.from_uncond, *kept, *weights)
        rows.append([timestep, input_scale, *estimate, keep, move.noise or 0.0, *rest])
    moves = [call.move for call in calls or [_NO_STEP]]
    return Schedule(
        0.0,
        torch.tensor(np.array(rows), dtype=torch.float32),
        tuple(move.noise is not None for move in moves),
        unguided=_unguided([call.move.level for call in calls], options.s_min_uncond),
        finished=tuple(max(0, move.finished) for move in moves),
    )


def _unguided(levels: Sequence[float], s_min_uncond: float) -> tuple[bool, ...]:
    """AUTOMATIC1111's "negative guidance minimum sigma": every other call below it.

    Its timestep samplers compare their timesteps with it.
    """
    if s_min_uncond <= 0:
        return ()
    return tuple(call % 2 == 1 and level < s_min_uncond for call, level in enumerate(levels))

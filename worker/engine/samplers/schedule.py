"""The schedule of a job's sampler: the sigmas of its steps, and its moves as rows of the table.

Sigmas are computed in float32 in the order of k-diffusion and AUTOMATIC1111, whose names schedules
have: the noise of SDE samplers follows from the sigmas to their last digits (`brownian`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from diffusers.schedulers.scheduling_utils import AysSchedules
from torch import Tensor

from imagefleet.errors import JobError
from imagefleet.job import samplers
from imagefleet.job.samplers import Options, Sampler
from worker.engine.sampler import LATENTS, BrownianNoise, Draw, Move, Schedule
from worker.engine.samplers import by_sigma, by_timestep
from worker.engine.samplers.adaptive import Try
from worker.engine.samplers.brownian import Interval

#: LCM's boundary conditions (Luo et al. 2023): sigma_data, and the scale of timesteps.
_LCM_DATA = 0.5
_LCM_SCALE = 10.0


#: Latents stay as they are.
_NO_STEP = Move(0.0, LATENTS, estimate=(0.0, 0.0))


def make_schedule(
    name: str,
    steps: int,
    alphas_cumprod: Tensor,
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
    own in "Align Your Steps". Raises JobError if there is no such sampler.
    """
    sampler = samplers.SAMPLERS.get(name)
    if sampler is None:
        raise JobError(samplers.unknown(name))
    if sampler.schedule is not None:
        alphas = alphas_cumprod.float()
        if options.is_downcast:
            alphas = alphas.half()
        sigmas = ((1 - alphas) / alphas) ** 0.5
        known = Levels(sigmas, torch.arange(len(sigmas), dtype=torch.float32), is_xl)
        return _of_sigmas(sampler, steps, known, prediction_type, options, t_enc)
    start = by_timestep.Start(1.0, 0.0)
    moves = [_NO_STEP]
    if steps:
        trained = by_timestep.Trained(alphas_cumprod.double().numpy(), prediction_type)
        start, path = by_timestep.SAMPLERS[sampler.method](
            steps, t_enc, trained, options
        )
        moves = list(path) or moves
    # Here AUTOMATIC1111 scales it as the image (`sd_samplers_timesteps.py`), with sigmas not.
    extra = 0.0 if t_enc is None else options.extra_noise * start.image_scale
    return replace(
        tabulate(moves, options, masks_input=True),
        timesteps=tuple(int(move.level) for move in moves),
        initial_scale=start.noise_scale + extra,
        image_scale=start.image_scale,
        guidance_share=sampler.guidance_share,
    )


def _of_sigmas(
    sampler: Sampler,
    steps: int,
    known: Levels,
    prediction_type: str,
    options: Options,
    t_enc: int | None,
) -> Schedule:
    schedule = sampler.schedule or "uniform"
    if (
        sampler.distilled_stride > 1 and schedule != "turbo"
    ):  # whose timesteps are DMD2's
        known = known.of_every(sampler.distilled_stride)
    leaves_out = steps > 0 and sampler.skips_next_to_last
    whole = make_sigmas(schedule, known, steps + leaves_out)
    if leaves_out:
        del whole[-2]
    sigmas = whole if t_enc is None else whole[steps - t_enc - 1 :]
    if not sigmas:  # of LCM's fifty timesteps, say; there it is an error as well
        raise JobError(
            f"{sampler.title} with the schedule {samplers.SCHEDULES[schedule]} has"
            f" {len(whole) - 1} steps at most, and this pass would be the last {t_enc} of {steps}:"
            " use another schedule, or a larger denoising_strength"
        )
    count = steps if t_enc is None else len(sigmas) - 1
    taken = sigmas
    if sampler.is_between_ends:
        # With an image alone the ends are the schedule's.
        ends = known.ends if t_enc is None else (sigmas[0], sigmas[-2:][0])
        taken = np.geomspace(*ends, count + 1).tolist() if count > 0 else []
    own = Options(**{name: getattr(options, name) for name in sampler.options})
    moves = (
        [] if sampler.is_adaptive else by_sigma.make_moves(sampler.method, taken, own)
    )
    if sampler.is_adaptive and taken and taken[0] > taken[-1]:
        first = Try(taken[0], taken[-1], options)
        made = _of_tries(sampler, first, (), known, prediction_type)
    else:
        called = [_called(sampler, move, known, prediction_type) for move in moves] or [
            _NO_STEP
        ]
        # In AUTOMATIC1111, LCM's are places among its fifty sigmas as well.
        nearest = [int((known.sigmas - move.level).abs().argmin()) for move in called]
        made = replace(tabulate(called, options), timesteps=tuple(nearest))
    churn = None
    if own.s_churn > 0:
        hat, *_ = by_sigma.churned(sigmas, options)
        churn = by_sigma.churn_noise(sigmas[0], hat, options)
    intervals = tuple(
        move.interval for move in moves if move.noise is not None and move.interval
    )
    brownian = None
    if intervals:
        brownian = BrownianNoise((min(filter(None, whole)), max(whole)), intervals)
    return replace(
        made,
        initial_scale=sigmas[0] + (0.0 if t_enc is None else options.extra_noise),
        image_scale=0.0 if t_enc is None else 1.0,
        initial_churn=churn,
        brownian=brownian,
    )


def _of_tries(
    sampler: Sampler,
    attempt: Try,
    before: Sequence[Move],
    known: Levels,
    prediction_type: str,
) -> Schedule:
    """The calls before a try and its own; the schedule is extended by the next one."""
    moves = [
        *before,
        *(_called(sampler, move, known, prediction_type) for move in attempt.moves()),
    ]
    made = tabulate(moves, attempt.options)

    def extend(latents: Tensor, history: Tensor, draw: Draw) -> Schedule:
        following = attempt.finish(latents, history, draw)
        if following.is_done:
            return made
        return _of_tries(sampler, following, moves, known, prediction_type)

    return replace(made, extend=extend)


def _called(sampler: Sampler, move: Move, known: Levels, prediction_type: str) -> Move:
    """A move between sigmas with how the UNet is called, and what is made of its output."""
    sigma = move.level
    variance = sigma**2 + 1
    timestep = known.timestep(sigma)
    from_latents = 1.0
    from_output = -sigma
    kept = move.kept
    if prediction_type == "v_prediction":
        from_latents = 1 / variance
        from_output = -sigma / math.sqrt(variance)
    if sampler.estimates == "noise":
        from_latents = (1 - from_latents) / sigma
        from_output = -from_output / sigma
        kept = -1 / sigma, 1 / sigma
    if sampler.estimates == "consistency":
        size = math.hypot(_LCM_SCALE * timestep, _LCM_DATA)
        image = _LCM_SCALE * timestep / size
        from_latents = image * from_latents + (_LCM_DATA / size) ** 2
        from_output = image * from_output
    return move._replace(
        timestep=timestep,
        input_scale=1 / math.sqrt(variance),
        estimate=(from_latents, from_output),
        kept=kept,
    )


def tabulate(
    moves: Sequence[Move], options: Options, *, masks_input: bool = False
) -> Schedule:
    """The table of one or more calls; the first latents are left to others."""
    rows = []
    for move in moves:
        keep, *weights = move.latents
        timestep = move.level if move.timestep is None else move.timestep
        row = [timestep, move.input_scale, *move.estimate, keep, move.noise or 0.0]
        beside = [float(masks_input), move.from_uncond, *move.kept]
        rows.append([*row, *beside, *move.variance_logs, *weights])
    return Schedule(
        0.0,
        torch.tensor(np.array(rows), dtype=torch.float32),
        tuple(move.noise is not None for move in moves),
        # AUTOMATIC1111's "negative guidance minimum sigma": every other call below it. Its timestep
        # samplers compare their timesteps with it.
        unguided=tuple(
            at % 2 == 1 and move.level < options.s_min_uncond
            for at, move in enumerate(moves)
        ),
        finished=tuple(max(0, move.finished) for move in moves),
    )


#: The last step of "Align Your Steps" (Sabour et al. 2024) in AUTOMATIC1111, which diffusers lacks.
_ALIGN_YOUR_STEPS_END = 0.029

#: AUTOMATIC1111's `beta_dist_alpha` and `beta_dist_beta`, which here are one.
_BETA_SHAPE = 0.6
_BETA_TERMS = 64
_BISECTIONS = 60

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Levels:
    """The sigmas that a model knows, ascending in float32 or float16, and their timesteps."""

    sigmas: Tensor
    timesteps: Tensor
    is_xl: bool = False
    #: True if the model is called at these timesteps alone, not between them.
    is_quantized: bool = False

    @property
    def ends(self) -> Interval:
        """The largest and the smallest sigma."""
        return float(self.sigmas[-1]), float(self.sigmas[0])

    def timestep(self, sigma: float) -> float:
        """The timestep of a sigma, whose logarithm is interpolated."""
        logs = self.sigmas.log()
        if self.is_quantized:
            own = torch.tensor(sigma, dtype=logs.dtype).log()
            distances = (own - logs).abs()
            # In the middle of two, the lower one: rounding differs between processors.
            lowest, *_ = (distances < distances.min() + 1e-5).nonzero()
            return float(self.timesteps[lowest])
        exact = logs.double().numpy()
        return float(np.interp(math.log(sigma), exact, self.timesteps.numpy()))

    def of_every(self, stride: int) -> Levels:
        """The levels at which a model that was distilled on every *stride*th timestep is called."""
        part = slice(stride - 1, None, stride)
        return Levels(
            self.sigmas[part], self.timesteps[part], self.is_xl, is_quantized=True
        )

    def at(self, timesteps: Tensor) -> Tensor:
        """The sigmas of timesteps, or of points between them, by k-diffusion's interpolation."""
        first = self.timesteps[0]
        stride = self.timesteps[1] - first
        place = ((timesteps - first) / stride).clamp(0, len(self.sigmas) - 1)
        logs = self.sigmas.log()
        share = place.frac()
        below = logs[place.floor().long()]
        above = logs[place.ceil().long()]
        return ((1 - share) * below + share * above).exp()

    def spaced(self, count: int, *, by_sigma: bool = False) -> Tensor:
        """*count* timesteps, evenly from the last to the first, or between those of the ends."""
        last = float(self.timesteps[-1])
        first = float(self.timesteps[0])
        if by_sigma and self.sigmas.dtype == torch.float16:
            # Its rounded logarithms lie beside those of the timesteps.
            last, first = map(self.timestep, self.ends)
        return torch.linspace(last, first, count)


def make_sigmas(schedule: str, known: Levels, steps: int) -> list[float]:
    """The sigmas of so many steps and of their end, which is 0 but with KL Optimal."""
    if steps == 0:
        return [0.0]
    made = SCHEDULES[schedule](known, steps)
    end = [] if len(made) > steps and schedule == "kl_optimal" else [0.0]
    return [*made.tolist(), *end]


def _turbo(known: Levels, steps: int) -> Tensor:
    """Whole timesteps that end a stride above -1: 999, 749, 499, 249 of four."""
    train = float(known.timesteps[-1]) + 1
    trailing = (torch.arange(1, steps + 1) * (train / steps) - 1).flip(0)
    return known.at(trailing.round().clamp(0, train - 1))


def _exponential(known: Levels, steps: int) -> Tensor:
    largest, smallest = known.ends
    return torch.linspace(math.log(largest), math.log(smallest), steps).exp()


def _polyexponential(known: Levels, steps: int) -> Tensor:
    """Polyexponential sigmas for AUTOMATIC1111's rho of 1: exponential ones, but for rounding."""
    largest, smallest = known.ends
    low = math.log(smallest)
    return (torch.linspace(1, 0, steps) * (math.log(largest) - low) + low).exp()


def _even_angles(known: Levels, shares: Tensor) -> Tensor:
    largest, smallest = (torch.tensor(end).arctan() for end in known.ends)
    return (shares * smallest + (1.0 - shares) * largest).tan()


def _align_your_steps(known: Levels, steps: int) -> Tensor:
    name = "StableDiffusionXLSigmas" if known.is_xl else "StableDiffusionSigmas"
    table = [*AysSchedules[name][:-1], _ALIGN_YOUR_STEPS_END]
    if steps == len(table):
        return torch.tensor(table)
    at = np.interp(
        np.linspace(0, 1, steps), np.linspace(0, 1, len(table)), np.log(table)
    )
    return torch.from_numpy(np.exp(at)).float()


def _simple(known: Levels, steps: int) -> Tensor:
    stride = len(known.sigmas) / steps
    places = [-1 - int(at * stride) for at in range(steps)]
    return known.sigmas[torch.tensor(places)]


def _beta(known: Levels, steps: int) -> Tensor:
    """Lee et al. (2024), "Beta Sampling is All You Need", of sigmas, as AUTOMATIC1111 has it."""
    largest, smallest = known.ends
    quantiles = _beta_quantiles(1 - np.linspace(0, 1, steps))
    return torch.from_numpy(smallest + quantiles * (largest - smallest)).float()


def _beta_of_timesteps(known: Levels, steps: int) -> Tensor:
    """The same of whole timesteps, as ComfyUI has it; each is there once."""
    shares = 1 - np.linspace(0, 1, steps, endpoint=False)
    places = np.rint(_beta_quantiles(shares) * (len(known.sigmas) - 1))
    return known.sigmas[[*dict.fromkeys(places.astype(int).tolist())]]


def _beta_quantiles(shares: _Numbers) -> _Numbers:
    """Quantiles of the symmetric beta distribution, by bisection of the lower half's series."""
    terms = np.arange(_BETA_TERMS)
    later = terms[1:]
    ratios = np.concatenate([[1.0], (later - _BETA_SHAPE) / later])
    weights = np.cumprod(ratios) / (terms + _BETA_SHAPE)
    scale = math.gamma(2 * _BETA_SHAPE) / math.gamma(_BETA_SHAPE) ** 2
    lower = np.minimum(shares, 1 - shares)
    low = np.zeros_like(lower)
    high = np.full_like(lower, 0.5)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        series = middle[:, None] ** terms @ weights
        is_below = scale * middle**_BETA_SHAPE * series < lower
        low = np.where(is_below, middle, low)
        high = np.where(is_below, high, middle)
    high[lower == 0] = 0
    return np.where(shares < 0.5, high, 1 - high)  # noqa: PLR2004 - the median


#: The sigmas of so many steps that the levels of a model give, by a schedule's key.
SCHEDULES: Mapping[str, Callable[[Levels, int], Tensor]] = {
    "uniform": lambda known, steps: known.at(known.spaced(steps)),
    "karras": lambda known, steps: by_sigma.karras(*known.ends, steps),
    "exponential": _exponential,
    "polyexponential": _polyexponential,
    "sgm_uniform": lambda known, steps: known.at(
        known.spaced(steps + 1, by_sigma=True)[:-1]
    ),
    # One sigma more than steps: the last one ends above 0.
    "kl_optimal": lambda known, steps: _even_angles(
        known, torch.arange(steps + 1) / steps
    ),
    "align_your_steps": _align_your_steps,
    "simple": _simple,
    "normal": lambda known, steps: known.at(known.spaced(steps, by_sigma=True)),
    "ddim": lambda known, steps: known.sigmas[
        1 :: max(1, len(known.sigmas) // steps)
    ].flip(0),
    "beta": _beta,
    "turbo": _turbo,
    "beta_comfyui": _beta_of_timesteps,
    "kl_optimal_comfyui": lambda known, steps: _even_angles(
        known, torch.arange(steps) / max(1, steps - 1)
    ),
}

"""Samplers of sigmas: latents have variance sigma^2 + 1, and estimates are the denoised image.

The formulas are those of k-diffusion (`sampling.py`); LCM's and Restart's are their papers', as
AUTOMATIC1111 steps through them. LMS weighs estimates of the noise, (latents - image) / sigma.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from imagefleet.job.samplers import Options
from worker.engine.sampler import BEFORE, ESTIMATES, LATENTS, Combination, Move, towards
from worker.engine.samplers.brownian import Interval

Sigmas = Sequence[float]
#: The calls of one step.
_Step = Sequence[Move]
_Steps = Iterator[_Step]
#: The sigmas that a step begins and ends at, and the noise that follows on it.
_Intervals = Iterator[tuple[float, float, float | None]]
_Bend = Callable[[Combination, float, Sequence[float]], Combination]

NEW, LAST = ESTIMATES[:2]

_LMS_ORDER = 4

#: Karras et al. (2022), table 1.
_RHO = 7.0

#: Restart goes through these sigmas again, from so many steps on, and twice from more.
_RESTART_FROM = 0.1
_RESTART_TO = 2.0
_RESTART_STEPS = 20
_MANY_RESTART_STEPS = 36


def karras(largest: float, smallest: float, steps: int) -> Tensor:
    """Karras et al. (2022), equation 5."""
    low = smallest ** (1 / _RHO)
    high = largest ** (1 / _RHO)
    sigmas: Tensor = (high + torch.linspace(0, 1, steps) * (low - high)) ** _RHO
    return sigmas


def churned(sigmas: Sigmas, options: Options) -> list[float]:
    """The sigma that each step starts from after its churn (Karras et al. 2022, algorithm 2)."""
    steps = max(1, len(sigmas) - 1)
    gamma = min(options.s_churn / steps, math.sqrt(2) - 1)
    return [
        sigma * (1 + gamma) if options.s_tmin <= sigma <= options.s_tmax else sigma
        for sigma in sigmas
    ]


def churn_noise(sigma: float, hat: float, options: Options) -> float:
    """Standard deviation of the noise that raises *sigma* to *hat*."""
    return options.s_noise * math.sqrt(hat**2 - sigma**2)


def _with_churn(sigmas: Sigmas, options: Options) -> _Intervals:
    """Each step from its sigma after churn, with the noise of the following step's churn.

    k-diffusion draws the noise of churn at each step, whether it is used or not; no step follows on
    the last, even where its sigma is not 0.
    """
    hats = churned(sigmas, options)
    last = len(sigmas) - 1
    for at, (hat, following) in enumerate(zip(hats, sigmas[1:], strict=False), start=1):
        has_noise = options.s_churn > 0 and at < last
        noise = churn_noise(following, hats[at], options) if has_noise else None
        yield hat, following, noise


def ancestral(
    sigma: float, following: float, options: Options
) -> tuple[float, float | None]:
    """The sigma that a step goes down to, and the noise that follows on it, if any."""
    eta = 1.0 if options.eta is None else options.eta
    ratio = following / sigma
    up = min(following, eta * following * math.sqrt(1 - ratio**2))
    return math.sqrt(following**2 - up**2), options.s_noise * up or None


def _ancestral(sigmas: Sigmas, options: Options) -> _Intervals:
    """Each step down, with the noise that raises its end to the following sigma."""
    for sigma, following in pairwise(sigmas):
        down, noise = ancestral(sigma, following, options)
        yield sigma, down, noise


def _to_image(sigmas: Sigmas, _: Options) -> _Intervals:
    """Each step to the image (LCM, Luo et al. 2023), with the noise of the following sigma."""
    for sigma, following in pairwise(sigmas):
        yield sigma, 0.0, following or None


def _euler_step(sigma: float, following: float, noise: float | None) -> _Step:
    return [Move(sigma, towards(following / sigma), noise)]


def _heun_step(sigma: float, following: float, noise: float | None) -> _Step:
    slopes = (BEFORE - LAST) / sigma + (LATENTS - NEW) / following
    return [
        Move(sigma, towards(following / sigma)),
        Move(following, BEFORE + (following - sigma) / 2 * slopes, noise),
    ]


def _midpoint_step(sigma: float, following: float, noise: float | None) -> _Step:
    middle = math.sqrt(sigma * following)
    slope = (LATENTS - NEW) / middle
    return [
        Move(sigma, towards(middle / sigma)),
        Move(middle, BEFORE + (following - sigma) * slope, noise),
    ]


def _dpmpp_2s_step(sigma: float, following: float, noise: float | None) -> _Step:
    middle = math.sqrt(sigma * following)
    return [
        Move(sigma, towards(middle / sigma)),
        Move(middle, towards(following / sigma, BEFORE), noise),
    ]


def _in_steps(
    intervals: Callable[[Sigmas, Options], _Intervals],
    step: Callable[[float, float, float | None], _Step],
    sigmas: Sigmas,
    options: Options,
) -> _Steps:
    """The same *step* over each of the *intervals*, but Euler's to sigma 0."""
    for sigma, following, noise in intervals(sigmas, options):
        yield (step if following else _euler_step)(sigma, following, noise)


def _dpmpp_sde(sigmas: Sigmas, options: Options) -> _Steps:
    for sigma, following in pairwise(sigmas):
        if following == 0:
            yield _euler_step(sigma, following, None)
            continue
        # The Brownian motion is asked for at these sigmas as k-diffusion rounds them.
        start, end = (-torch.tensor(each).log() for each in (sigma, following))
        times = (start, start + (end - start) / 2, end)
        start_sigma, middle, end_sigma = (float(time.neg().exp()) for time in times)
        down, noise = ancestral(sigma, middle, options)
        first = Move(sigma, towards(down / sigma), noise, (start_sigma, middle))
        down, noise = ancestral(sigma, following, options)
        latents = towards(down / sigma, BEFORE)
        yield first, Move(middle, latents, noise, (start_sigma, end_sigma))


def _dpmpp_2m(sigmas: Sigmas, _: Options) -> _Steps:
    """First order at the first step, without an earlier estimate, and at the last, to sigma 0."""
    for at, (sigma, following) in enumerate(pairwise(sigmas)):
        ratio = following / sigma
        move = towards(ratio)
        if at > 0 and following > 0:
            last = math.log(sigmas[at - 1] / sigma) / math.log(sigma / following)
            move = move + (1 - ratio) / (2 * last) * (NEW - LAST)
        yield [Move(sigma, move)]


def _dpmpp_multistep_sde(bend: _Bend, sigmas: Sigmas, options: Options) -> _Steps:
    """The SDE's first order steps, which *bend* corrects by the estimates of earlier ones.

    The length of a step is h in log sigma, and h + eta h with noise.
    """
    eta = 1.0 if options.eta is None else options.eta
    lengths = []
    for sigma, following in pairwise(sigmas):
        if following == 0:
            yield _euler_step(sigma, following, None)
            continue
        length = math.log(sigma / following)
        lengths.append(length)
        variance = -math.expm1(-2 * eta * length)
        noise = following * math.sqrt(variance) * options.s_noise
        latents = towards(math.exp(-length * (1 + eta)))
        if len(lengths) > 1:
            latents = bend(latents, length * (1 + eta), lengths)
        yield [Move(sigma, latents, noise or None, (sigma, following))]


def _second_order(
    latents: Combination,
    long: float,
    lengths: Sequence[float],
    *,
    is_heun: bool = False,
) -> Combination:
    ratio = lengths[-2] / lengths[-1]
    growth = math.expm1(-long)
    weight = 1 + growth / long if is_heun else -growth / 2
    return latents + weight / ratio * (NEW - LAST)


def _third_order(
    latents: Combination, long: float, lengths: Sequence[float]
) -> Combination:
    newest, before, *older = reversed(lengths)
    phi_2 = math.expm1(-long) / long + 1
    first = before / newest
    slope = (NEW - LAST) / first
    if older:
        second = older[0] / newest
        curve = (slope - (LAST - ESTIMATES[2]) / second) / (first + second)
        latents = latents - (phi_2 / long - 0.5) * curve
        slope = slope + first * curve
    return latents + phi_2 * slope


def _lms(sigmas: Sigmas, _: Options) -> _Steps:
    """Adams-Bashforth's method of the noise, over uneven steps: two points are exact for cubics."""
    points, weights = np.polynomial.legendre.leggauss(2)
    for at, (sigma, following) in enumerate(pairwise(sigmas)):
        oldest = max(0, at + 1 - _LMS_ORDER)
        known = sigmas[oldest : at + 1][::-1]
        half = (following - sigma) / 2
        places = sigma + half * (points + 1)
        latents = LATENTS
        for this, estimate in zip(known, ESTIMATES, strict=False):
            factors = [
                (places - other) / (this - other) for other in known if other != this
            ]
            basis = np.prod([points**0, *factors], axis=0)
            latents = latents + half * (weights @ basis) * estimate
        yield [Move(sigma, latents)]


def _dpm_fast(sigmas: Sigmas, options: Options) -> _Steps:
    """DPM-Solver-Fast (Lu et al. 2022): steps of three calls, of equal lengths in log sigma.

    Of the sigmas only the number and the ends count.
    """
    if not sigmas:
        return
    smallest = sigmas[-1]
    whole, rest = divmod(len(sigmas) - 1, 3)
    orders = [3] * whole + [rest] if rest else [3] * (whole - 1) + [2, 1]
    places = np.linspace(math.log(sigmas[0]), math.log(smallest), whole + 2)
    ends = map(math.exp, places)
    for order, (sigma, following) in zip(orders, pairwise(ends), strict=False):
        down, _ = ancestral(sigma, following, options)
        down = max(smallest, down)
        if options.eta is not None and options.eta <= 0:
            yield solver_step(order, sigma, following)
            continue
        noise = options.s_noise * math.sqrt(max(0.0, following**2 - down**2))
        *first, last = solver_step(order, sigma, down)
        yield [*first, last._replace(noise=noise)]


def solver_step(order: int, sigma: float, end: float) -> _Step:
    """The calls of DPM-Solver's singlestep of an order, by its section 3; the last one arrives."""
    if order == 1:
        return _euler_step(sigma, end, None)
    length = math.log(sigma / end)
    first = sigma * math.exp(-length / order)
    begun = Move(sigma, towards(first / sigma))
    if order == 2:  # noqa: PLR2004
        return [begun, Move(first, BEFORE + (end - sigma) * (LATENTS - NEW) / first)]
    second = sigma * math.exp(-2 * length / 3)
    slope = (BEFORE - LAST) / sigma
    change = (LATENTS - NEW) / first - slope
    straight = BEFORE + (second - sigma) * slope
    bent = second * 2 * bend(2 * length / 3)
    middle = Move(first, straight - bent * change)
    slope = (BEFORE - ESTIMATES[2]) / first  # the same: its call's step went along it
    change = (LATENTS - NEW) / second - slope
    straight = BEFORE + (sigma - first) * slope + (end - sigma) * slope
    return [begun, middle, Move(second, straight - end * 1.5 * bend(length) * change)]


def bend(length: float) -> float:
    """(exp(h) - 1) / h - 1, which is what a step of length h has of the slope's change."""
    if length:
        return math.expm1(length) / length - 1
    return 0.0


def _restart(sigmas: Sigmas, _: Options) -> _Intervals:
    """Steps that go back by noise (Xu et al. 2023), by AUTOMATIC1111's rule."""
    steps = _restart_steps(list(sigmas))
    begins = [begin for begin, _ in steps[1:]]
    for (sigma, following), begin in zip(steps, [*begins, 0.0], strict=False):
        goes_back = begin > following
        noise = math.sqrt(begin**2 - following**2) if goes_back else None
        yield sigma, following, noise


def _restart_steps(sigmas: list[float]) -> list[Interval]:
    """Restart's steps: of 20 or more, 9 are repeated, sigma 2 to 0.1; of 36, a quarter twice."""
    count = len(sigmas) - 1
    if count < _RESTART_STEPS:
        return list(pairwise(sigmas))
    repeated, times = (count // 4, 2) if count >= _MANY_RESTART_STEPS else (9, 1)
    kept = karras(sigmas[0], sigmas[-2], count - repeated * times)
    known = torch.cat([kept, torch.zeros(1)])
    low = int((known - _RESTART_FROM).abs().argmin())
    high = int((known - _RESTART_TO).abs().argmin())
    whole = list(pairwise(known.tolist()))
    if high >= low or low == 0:
        return whole
    part = karras(float(known[high]), float(known[low]), repeated + 1)
    again = list(pairwise(part.tolist())) * times
    return [*whole[:low], *again, *whole[low:]]


#: The steps of a sampler, by its key, from its sigmas.
_SAMPLERS: Mapping[str, Callable[[Sigmas, Options], _Steps]] = {
    "euler_ancestral": partial(_in_steps, _ancestral, _euler_step),
    "euler": partial(_in_steps, _with_churn, _euler_step),
    "dpmpp_2m": _dpmpp_2m,
    "dpmpp_sde": _dpmpp_sde,
    "dpmpp_2m_sde": partial(_dpmpp_multistep_sde, _second_order),
    "dpmpp_2m_sde_heun": partial(
        _dpmpp_multistep_sde, partial(_second_order, is_heun=True)
    ),
    "dpmpp_2s_ancestral": partial(_in_steps, _ancestral, _dpmpp_2s_step),
    "dpmpp_3m_sde": partial(_dpmpp_multistep_sde, _third_order),
    "lms": _lms,
    "heun": partial(_in_steps, _with_churn, _heun_step),
    "dpm_2": partial(_in_steps, _with_churn, _midpoint_step),
    "dpm_2_ancestral": partial(_in_steps, _ancestral, _midpoint_step),
    "dpm_fast": _dpm_fast,
    "restart": partial(_in_steps, _restart, _heun_step),
    "lcm": partial(_in_steps, _to_image, _euler_step),
}


def make_moves(method: str, sigmas: Sigmas, options: Options) -> list[Move]:
    """A sampler's moves by its key; all calls of a step but the first count it as finished."""
    return [
        move._replace(finished=at - (call == 0))
        for at, calls in enumerate(_SAMPLERS[method](sigmas, options))
        for call, move in enumerate(calls)
    ]

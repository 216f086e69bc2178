"""Calls of the model by samplers of sigmas, with the noise that follows on each.

Functions of k-diffusion's `sampling.py`, and of AUTOMATIC1111's own samplers, by their formulas.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass
class Options:
    eta: float
    churn: float
    tmin: float
    tmax: float
    noise: float


def karras(count: int, low: float, high: float) -> list[float]:
    ramp = np.linspace(0, 1, count)
    root = high ** (1 / 7) + ramp * (low ** (1 / 7) - high ** (1 / 7))
    return (root**7).tolist()


def hat_of(sigma: float, options: Options, steps: int) -> float:
    """`sample_euler`: gamma."""
    if not options.tmin <= sigma <= options.tmax:
        return sigma
    return sigma * (1 + min(options.churn / max(1, steps), math.sqrt(2) - 1))


def _ancestral(start: float, end: float, eta: float) -> tuple[float, float]:
    """`get_ancestral_step`."""
    if not eta:
        return end, 0.0
    up = min(end, eta * math.sqrt(end**2 * (start**2 - end**2) / start**2))
    return math.sqrt(end**2 - up**2), up


_Calls = Iterator[tuple[float, float | None]]


def _churned(sigmas: Sequence[float], options: Options, middle: str) -> _Calls:
    """`sample_euler`, `sample_heun` and `sample_dpm_2`; noise is drawn before each step."""
    count = len(sigmas) - 1
    for at, following in enumerate(sigmas[1:]):
        hat = hat_of(sigmas[at], options, count)
        noise = None
        if options.churn > 0 and at + 1 < count:
            raised = hat_of(following, options, count)
            noise = options.noise * math.sqrt(max(0.0, raised**2 - following**2))
        if following == 0 or middle == "none":
            yield hat, noise
            continue
        yield hat, None
        yield (following if middle == "end" else math.sqrt(hat * following)), noise


def _ancestral_steps(sigmas: Sequence[float], options: Options, middle: bool) -> _Calls:
    """`sample_euler_ancestral`, `sample_dpm_2_ancestral` and `sample_dpmpp_2s_ancestral`."""
    for sigma, following in pairwise(sigmas):
        down, up = _ancestral(sigma, following, options.eta)
        noise = options.noise * up if following else None
        if down == 0 or not middle:
            yield sigma, noise
            continue
        yield sigma, None
        yield math.sqrt(sigma * down), noise


def _plain(sigmas: Sequence[float], _: Options) -> _Calls:
    """`sample_dpmpp_2m` and `sample_lms`."""
    yield from ((sigma, None) for sigma in sigmas[:-1])


def _sde(sigmas: Sequence[float], options: Options) -> _Calls:
    """`sample_dpmpp_2m_sde` and `sample_dpmpp_3m_sde`."""
    for sigma, following in pairwise(sigmas):
        if following == 0:
            yield sigma, None
            continue
        length = math.log(sigma / following)
        share = -math.expm1(-2 * length * options.eta)
        yield sigma, following * math.sqrt(share) * options.noise


def _sde_of_two(sigmas: Sequence[float], options: Options) -> _Calls:
    """`sample_dpmpp_sde`."""
    for sigma, following in pairwise(sigmas):
        if following == 0:
            yield sigma, None
            continue
        middle = math.sqrt(sigma * following)
        yield sigma, _ancestral(sigma, middle, options.eta)[1] * options.noise
        yield middle, _ancestral(sigma, following, options.eta)[1] * options.noise


def _lcm(sigmas: Sequence[float], _: Options) -> _Calls:
    """`sd_samplers_lcm.py`, `sample_lcm`."""
    for sigma, following in pairwise(sigmas):
        yield sigma, following or None


def _restart(sigmas: Sequence[float], _: Options) -> _Calls:
    """`sd_samplers_extra.py`, `restart_sampler`."""
    known = list(sigmas)
    again = {}
    count = len(known) - 1
    if count >= 20:
        steps, times = (count // 4, 2) if count >= 36 else (9, 1)
        known = [*karras(count - steps * times, known[-2], known[0]), 0.0]
        low = min(range(len(known)), key=lambda at: abs(known[at] - 0.1))
        high = min(range(len(known)), key=lambda at: abs(known[at] - 2))
        if high < low:
            part = karras(steps + 1, known[low], known[high])
            again[low] = [*pairwise(part)] * times
    whole: list[tuple[float, float]] = []
    for at, pair in enumerate(pairwise(known)):
        whole += [pair, *again.get(at + 1, [])]
    begins = [*(begin for begin, _ in whole[1:]), 0.0]
    for (sigma, following), begin in zip(whole, begins, strict=True):
        noise = math.sqrt(begin**2 - following**2) if begin > following else None
        if following == 0:
            yield sigma, noise
        else:
            yield sigma, None
            yield following, noise


def dpm_fast(largest: float, smallest: float, count: int, options: Options) -> _Calls:
    """`DPMSolver.dpm_solver_fast`."""
    steps = count // 3 + 1
    orders = [3] * (steps - 1) + [count % 3]
    if count % 3 == 0:
        orders = [3] * (steps - 2) + [2, 1]
    ends = np.exp(
        np.linspace(math.log(largest), math.log(smallest), steps + 1)
    ).tolist()
    for order, (sigma, following) in zip(orders, pairwise(ends), strict=False):
        down = following
        noise = None
        if options.eta:
            down = max(smallest, _ancestral(sigma, following, options.eta)[0])
            noise = options.noise * math.sqrt(max(0.0, following**2 - down**2))
        length = math.log(sigma / down)
        shares = {1: [0.0], 2: [0.0, 1 / 2], 3: [0.0, 1 / 3, 2 / 3]}[order]
        *begun, last = (sigma * math.exp(-share * length) for share in shares)
        yield from ((each, None) for each in begun)
        yield last, noise


CALLS: dict[str, Any] = {
    "DPM++ 2M": _plain,
    "LMS": _plain,
    "DPM++ SDE": _sde_of_two,
    "DPM++ 2M SDE": _sde,
    "DPM++ 2M SDE Heun": _sde,
    "DPM++ 3M SDE": _sde,
    "DPM++ 2S a": lambda sigmas, options: _ancestral_steps(
        sigmas, options, middle=True
    ),
    "DPM2 a": lambda sigmas, options: _ancestral_steps(sigmas, options, middle=True),
    "Euler a": lambda sigmas, options: _ancestral_steps(sigmas, options, middle=False),
    "Euler": lambda sigmas, options: _churned(sigmas, options, "none"),
    "Heun": lambda sigmas, options: _churned(sigmas, options, "end"),
    "DPM2": lambda sigmas, options: _churned(sigmas, options, "middle"),
    "Restart": _restart,
    "LCM": _lcm,
}

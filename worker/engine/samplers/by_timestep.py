"""Samplers of timesteps: latents have variance 1, and estimates are the noise, or UniPC's image.

DDIM, PLMS and UniPC follow AUTOMATIC1111. The timesteps of the first two are 1, 1 + r, 1 + 2r, ...
below 1000 with r = 1000 // steps, of which the last takes no step; PLMS calls the UNet twice at the
second one. UniPC is Zhao et al. (2023) of order 3 with B(h) = h, at even times. TCD is Zheng et al.
(2024), as diffusers' `TCDScheduler` has it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from imagefleet.job.samplers import Options
from worker.engine.sampler import ESTIMATES, LATENTS, Coefficients, Combination, Move

Alphas = npt.NDArray[np.float64]

#: The weights of the Adams-Bashforth methods of orders 1 to 4, newest first.
_ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)

_UNIPC_ORDER = 3

#: TCD was distilled on so many timesteps; its paper's stochasticity.
_TCD_TIMESTEPS = 50
_TCD_GAMMA = 0.3


class Trained(NamedTuple):
    """What a model was trained on: its noise schedule, and what it predicts of it."""

    alphas: Alphas
    prediction_type: str

    def to_noise(self, timestep: int) -> Coefficients:
        """Coefficients of latents and output in the noise."""
        alpha = self.alphas[timestep]
        if self.prediction_type == "v_prediction":
            return math.sqrt(1 - alpha), math.sqrt(alpha)
        return 0.0, 1.0


class Start(NamedTuple):
    """Scales of the image and of the noise in the first latents."""

    image_scale: float
    noise_scale: float


#: Of noise alone.
_NOISE = Start(0.0, 1.0)

#: Start of a sampler, and its moves.
Path = tuple[Start, Iterator[Move]]


def _noised(alpha: float) -> Start:
    return Start(math.sqrt(alpha), math.sqrt(1 - alpha))


def _by_noise(moves: Iterator[Move], trained: Trained) -> Iterator[Move]:
    """The moves of a sampler whose estimates are the noise, `from_uncond` in terms of it."""
    for move in moves:
        timestep = int(move.level)
        alpha = trained.alphas[timestep]
        deviation = math.sqrt(1 - alpha)
        estimate = trained.to_noise(timestep)
        yield move._replace(
            estimate=estimate,
            from_uncond=move.from_uncond * estimate[1],
            kept=(-math.sqrt(alpha) / deviation, 1 / deviation),
        )


def _ddim(
    path: Sequence[int], alphas: Alphas, options: Options, *, is_cfgpp: bool = False
) -> Iterator[Move]:
    """*is_cfgpp*: the noise that is put back is that without the prompt (Chung et al. 2024)."""
    eta = options.eta or 0.0
    for at, (timestep, following) in enumerate(pairwise(path)):
        alpha = alphas[timestep]
        next_alpha = alphas[following]
        variance = (1 - next_alpha) / (1 - alpha) * (1 - alpha / next_alpha)
        noise = eta * math.sqrt(variance)
        back = math.sqrt(max(0.0, 1 - next_alpha - noise**2))
        yield Move(
            timestep,
            _transfer(alpha, next_alpha, noise),
            noise if eta else None,
            finished=at - 1,
            from_uncond=back if is_cfgpp else 0.0,
        )


def _plms(path: Sequence[int], alphas: Alphas, _: Options) -> Iterator[Move]:
    """The first step is repeated with the mean of the estimates at both of its ends."""
    for at, (timestep, following) in enumerate(pairwise(path)):
        order = min(at, len(_ADAMS_BASHFORTH) - 1)
        known = list(ESTIMATES)
        if at > 0:
            del known[at : at + 1]  # the estimate that only the repeated step uses
        slope = _weighed(_ADAMS_BASHFORTH[order], known)
        move = _transfer(alphas[timestep], alphas[following], slope=slope)
        yield Move(timestep, move, finished=at - 1)
        if at == 0:
            gain = float(move[1])
            repeated = LATENTS + gain / 2 * (ESTIMATES[0] - ESTIMATES[1])
            yield Move(following, repeated)


def _transfer(
    alpha: float,
    following: float,
    noise: float = 0.0,
    slope: Combination = ESTIMATES[0],
) -> Combination:
    """The next latents by an estimate of the noise (Song et al. 2021, equation 12).

    *noise* is the standard deviation of fresh noise in them.
    """
    keep = math.sqrt(following / alpha)
    towards_noise = math.sqrt(max(0.0, 1 - following - noise**2))
    gain = towards_noise - keep * math.sqrt(1 - alpha)
    return keep * LATENTS + gain * slope


def ddim_timesteps(steps: int, alphas: Alphas) -> list[int]:
    """The timestep of each step, and of the last one's result."""
    last = len(alphas) - 1
    return [
        min(1 + at, last)
        for at in reversed(range(0, len(alphas), len(alphas) // steps))
    ]


def _ddim_path(
    steps: int, t_enc: int | None, alphas: Alphas
) -> tuple[Start, list[int]]:
    """The start, and the timesteps from there on."""
    known = ddim_timesteps(steps, alphas)
    if t_enc is None:
        return _NOISE, known
    return _noised(alphas[known[-1 - t_enc]]), known[len(known) - t_enc :]


def _tcd(steps: int, t_enc: int | None, trained: Trained, options: Options) -> Path:
    grid = max(_TCD_TIMESTEPS, steps)
    stride = len(trained.alphas) // grid
    known = (np.arange(grid, 0, -1) * stride - 1).tolist()
    path = [known[int(at * grid / steps)] for at in range(steps)]
    taken = path if t_enc is None else path[steps - t_enc - 1 :]
    start = _NOISE if t_enc is None else _noised(trained.alphas[taken[0]])
    return start, _by_noise(_tcd_moves(taken, trained.alphas, options), trained)


def _tcd_moves(path: Sequence[int], alphas: Alphas, options: Options) -> Iterator[Move]:
    """Each step goes beyond its end by a share of the way, and back by noise; not the last one."""
    gamma = _TCD_GAMMA if options.eta is None else options.eta
    for at, (timestep, following) in enumerate(pairwise([*path, 0])):
        beyond = alphas[int((1 - gamma) * following)]
        is_last = at + 1 == len(path)
        kept = alphas[following] / beyond if gamma and not is_last else 1.0
        move = math.sqrt(kept) * _transfer(alphas[timestep], beyond)
        noise = math.sqrt(1 - kept) or None
        yield Move(timestep, move, noise, finished=at - 1)


class _Times(NamedTuple):
    """UniPC's points: alpha, sigma and log(alpha / sigma) of each."""

    alpha: Alphas
    sigma: Alphas
    level: Alphas

    def weights(
        self, at: int, order: int, *, is_corrector: bool
    ) -> tuple[float, Alphas]:
        """Weights of the previous latents, and of the estimates, in the latents at a point.

        The weights [order + 1] are of the estimate at the point itself, which only the corrector
        has, and of those before it, newest first.
        """
        gap = self.level[at] - self.level[at - 1]
        earlier = self.level[at - order : at - 1][::-1]
        places = [*((earlier - self.level[at - 1]) / gap).tolist(), 1.0]
        kept = -gap
        phi = math.expm1(kept) / kept - 1
        factorial = 1
        targets = []
        for power in range(1, order + 1):
            targets.append(phi * factorial / kept)
            factorial *= power + 1
            phi = phi / kept - 1 / factorial
        matrix = np.array(
            [[place**power for place in places] for power in range(order)]
        )
        found = np.zeros(order)
        size = order if is_corrector else order - 1
        solved = np.linalg.solve(matrix[:size, :size], targets[:size])
        found[:size] = 0.5 if size == 1 else solved
        found *= -self.alpha[at] * kept
        weights = np.zeros(order + 1)
        weights[0] = found[-1]
        weights[2:] = found[:-1] / places[:-1]
        weights[1] = -self.alpha[at] * math.expm1(kept) - weights.sum()
        return self.sigma[at] / self.sigma[at - 1], weights


def _unipc(steps: int, t_enc: int | None, trained: Trained, _: Options) -> Path:
    """UniPC's start and moves. It makes as many calls as steps: the last point needs none."""
    start, path = _ddim_path(steps, t_enc, trained.alphas)
    first = 1.0
    if t_enc:
        train = len(trained.alphas)
        first = float(np.float32(path[0] / train) + np.float32(1 / train))
    return start, _unipc_moves(first, len(path), trained)


def _unipc_moves(first: float, count: int, trained: Trained) -> Iterator[Move]:
    train = len(trained.alphas)
    times = np.linspace(first, 1 / train, count + 1)
    # As AUTOMATIC1111 rounds them: some are a little below a whole one, and are cut off to the one
    # before where its model of velocities looks an alpha up.
    timesteps = (torch.linspace(first, 1 / train, count + 1) - 1 / train) * train
    known_times = np.arange(1, train + 1) / train
    logs = np.interp(times, known_times, 0.5 * np.log(trained.alphas))
    sigma = np.sqrt(-np.expm1(2 * logs))
    points = _Times(np.exp(logs), sigma, logs - np.log(sigma))
    highest = min(_UNIPC_ORDER, count)
    points_left = range(count + 1, 0, -1)
    orders = [min(at, highest, left) for at, left in enumerate(points_left)]
    corrected = LATENTS
    predicted = (1.0, np.zeros(1))
    for at, timestep in enumerate(timesteps[:-1].tolist()):
        if at > 0:  # the latents are what was predicted of those corrected before
            keep, weights = predicted
            before = (LATENTS - _weighed(weights[1:], ESTIMATES[1:])) / keep
            keep, weights = points.weights(at, orders[at], is_corrector=True)
            corrected = keep * before + _weighed(weights, ESTIMATES)
        predicted = points.weights(at + 1, orders[at + 1], is_corrector=False)
        keep, weights = predicted
        from_latents, from_output = trained.to_noise(int(timestep))
        noise = points.sigma[at]
        alpha = points.alpha[at]
        yield Move(
            timestep,
            keep * corrected + _weighed(weights[1:], ESTIMATES),
            finished=at - 2,
            estimate=((1 - noise * from_latents) / alpha, -noise * from_output / alpha),
        )


def _weighed(
    weights: Sequence[float] | Alphas, vectors: Sequence[Combination]
) -> Combination:
    return sum(
        (weight * vector for weight, vector in zip(weights, vectors, strict=False)),
        0 * LATENTS,
    )


def _of_ddim_timesteps(
    moves: Callable[[Sequence[int], Alphas, Options], Iterator[Move]],
    steps: int,
    t_enc: int | None,
    trained: Trained,
    options: Options,
) -> Path:
    start, path = _ddim_path(steps, t_enc, trained.alphas)
    return start, _by_noise(moves(path, trained.alphas, options), trained)


#: The path of a sampler, by its key; see `schedule.make_schedule`.
SAMPLERS: Mapping[str, Callable[[int, int | None, Trained, Options], Path]] = {
    "ddim": partial(_of_ddim_timesteps, _ddim),
    "ddim_cfgpp": partial(_of_ddim_timesteps, partial(_ddim, is_cfgpp=True)),
    "plms": partial(_of_ddim_timesteps, _plms),
    "unipc": _unipc,
    "tcd": _tcd,
}

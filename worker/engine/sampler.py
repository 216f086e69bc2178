"""The one update that all samplers share, and its table: one row of coefficients per UNet call.

Every sampler is linear in the latents, the UNet's output, earlier estimates and fresh noise, so one
update serves all rows of a batch, whatever each row's sampler and step:

    output   = unet(input_scale * latents, timestep)
    estimate = from_latents * latents + from_output * output
    latents  = keep * latents + noise_scale * noise + weights . [estimate, earlier ones, before]

*before* are the latents that the last call began with, from which a step's second call starts. One
sampler also takes the output without guidance. Inpainting keeps a part of the latents, as
AUTOMATIC1111's `CFGDenoiser` does: of the estimate where that is the image, and of what the UNet
sees where it is the noise.

`worker.engine.samplers` makes the rows from each sampler's moves, written with the vectors
`LATENTS`, `ESTIMATES` and `BEFORE` as its paper has it: where a step has begun from x and the
UNet's estimate is D, `LATENTS + (to - sigma) * (LATENTS - ESTIMATES[0]) / sigma` are the
coefficients of Euler's step. The noise follows from an image's seed alone: the same in any company.
"""

import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from imagefleet.job.noise import PHILOX, Noise
from worker.engine.samplers.brownian import BrownianTree, Interval
from worker.engine.samplers.philox import Philox, Shape

#: Draws each image's next noise while the GPU works: for 512x512 0.9 ms of Philox, which sixteen
#: slots would wait for a fifth of a tick, and twenty draws for a Brownian motion.
_AHEAD = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "noise")

#: Calls whose noise is drawn together: a Brownian motion takes half the draws for eight as for one,
#: but an image's first tick waits for all of them.
_DRAWN_AT_ONCE = 8

#: Estimates that an update weighs, newest first: PLMS uses four, and skips one it has replaced.
ESTIMATE_COUNT = 5

#: What is kept of a row's earlier calls: estimates, and the latents that the last one began with.
HISTORY = ESTIMATE_COUNT + 1

#: The columns of a schedule's table; HISTORY weights start at the last one. The two of a kept part
#: are what an estimate is there, of the original and of the latents; the two before the weights are
#: the logarithms of the bounds of a variance that a UNet of pixels predicts.
(
    TIMESTEP,
    INPUT_SCALE,
    FROM_LATENTS,
    FROM_OUTPUT,
    KEEP,
    NOISE_SCALE,
    MASKS_INPUT,
    FROM_UNCOND,
    KEPT_FROM_ORIGINAL,
    KEPT_FROM_LATENTS,
    SMALL_LOG,
    LARGE_LOG,
    FIRST_WEIGHT,
) = range(13)

COLUMNS = FIRST_WEIGHT + HISTORY


class BrownianNoise(NamedTuple):
    """Noise that is increments of a Brownian motion over sigma."""

    #: The smallest and the largest sigma.
    span: Interval
    #: Start and end sigmas of each increment, in the order of the calls with noise.
    intervals: tuple[Interval, ...]


#: Fills a tensor with an image's next noise.
Draw = Callable[[Tensor], None]

#: Extends a schedule, given an image's latents (may be changed), history and source of noise.
Extend = Callable[[Tensor, Tensor, Draw], "Schedule"]

#: Limits estimates of images.
Limit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Schedule:
    """One image's coefficients, one row per UNet call."""

    #: Standard deviation of the first latents.
    initial_scale: float
    #: [calls, COLUMNS] in float32.
    table: Tensor
    #: True for calls that use noise; for others none may be drawn, or later noise would change.
    noisy: tuple[bool, ...]
    #: Standard deviation of more noise for the first latents; None if none may be drawn.
    initial_churn: float | None = None
    #: True for calls that take the prompt's output alone, without guidance; () for none.
    unguided: tuple[bool, ...] = ()
    #: Share of the image's latents in the first latents; 0 where they are noise alone.
    image_scale: float = 0.0
    #: The noise of SDE samplers; None for noise that is drawn one after the other.
    brownian: BrownianNoise | None = None
    #: Number of finished steps at each call, as AUTOMATIC1111 counts them.
    finished: tuple[int, ...] = ()
    #: Factor of the guidance scale.
    guidance_share: float = 1.0
    #: Makes the schedule longer after its last call; None for one that is whole.
    extend: Extend | None = None
    #: The model's timestep at each call, as AUTOMATIC1111 counts until its refiner goes on.
    timesteps: tuple[int, ...] = ()

    def switch_call(self, switch_at: float | None, total_steps: int | None) -> int:
        """The first call of a refiner; the number of calls if there is none.

        As `apply_refiner` (AUTOMATIC1111 1.10): once a share of the timesteps, in float32, is done,
        or of *total_steps*, if given, of which each call is one. None: at the first call.
        """
        done = (999 - torch.tensor(self.timesteps)) / 1000
        if total_steps is not None:
            done = torch.arange(len(self.table), dtype=torch.float64) / total_steps
        reached = (done >= (switch_at or 0.0)).tolist()
        if True in reached:
            return reached.index(True)
        return len(reached)


class Inpainting(NamedTuple):
    """Kept areas of a batch of images while the rest is drawn anew."""

    #: [batch, 1, height, width]: 1 where the original stays, 0 elsewhere.
    kept: Tensor
    #: The latents that it began with, without noise [batch, 4, height, width].
    original: Tensor


def mask_input(rows: Tensor, latents: Tensor, image: Inpainting) -> Tensor:
    """The latents that the UNet sees: the original's where DDIM and PLMS keep it."""
    kept = rows[:, MASKS_INPUT, None, None, None] * image.kept
    return latents * (1 - kept) + image.original * kept


def step(
    rows: Tensor,
    latents: Tensor,
    output: Tensor,
    history: Tensor,
    noise: Tensor | None,
    image: Inpainting | None = None,
    uncond: Tensor | None = None,
    limit: Limit | None = None,
) -> tuple[Tensor, Tensor]:
    """One update of a batch: the next latents and history.

    A row that restarts needs zeros in *history*: its weights are 0, but 0 times NaN is NaN.

    *rows* are of each image's table [batch, COLUMNS]; *history* earlier estimates, newest first,
    and the latents before the last call [HISTORY, batch, 4, height, width]; latents, the UNet's
    *output* with guidance, the one without (*uncond*) and *noise* are [batch, 4, height, width].
    Noise and *uncond* are None if no row uses any, *image* if none keeps anything. *limit* is what
    estimates are limited by, if by anything.
    """
    columns = rows.T[..., None, None, None]
    seen = latents if image is None else mask_input(rows, latents, image)
    estimate = columns[FROM_LATENTS] * seen + columns[FROM_OUTPUT] * output
    if limit is not None:
        estimate = limit(estimate)
    if image is not None:
        kept = (1 - columns[MASKS_INPUT]) * image.kept
        from_original = columns[KEPT_FROM_ORIGINAL] * image.original
        there = from_original + columns[KEPT_FROM_LATENTS] * latents
        estimate = estimate * (1 - kept) + there * kept
    estimates = torch.cat([estimate[None], history[: ESTIMATE_COUNT - 1]])
    before = history[-1]
    stepped = columns[KEEP] * latents + columns[-1] * before
    stepped += (columns[FIRST_WEIGHT:-1] * estimates).sum(dim=0)
    if uncond is not None:
        stepped += columns[FROM_UNCOND] * (uncond - output)
    if noise is not None:
        stepped += columns[NOISE_SCALE] * noise
    return stepped, torch.cat([estimates, latents[None]])


def image_of(row: Tensor, history: Tensor) -> Tensor:
    """The latents [4, height, width] of the image that an update has estimated, without noise.

    *row*: of the call's table [COLUMNS]; *history* [HISTORY, 4, height, width]: as it left it. Some
    samplers' estimates are of the noise.
    """
    from_latents = float(row[KEPT_FROM_LATENTS])
    return (history[0] - from_latents * history[-1]) / float(row[KEPT_FROM_ORIGINAL])


#: Coefficients [1 + HISTORY]: of the latents, the estimates and the call before's latents.
Combination = npt.NDArray[np.float64]

LATENTS, *ESTIMATES, BEFORE = np.eye(1 + HISTORY)

#: Two coefficients of an estimate: of the latents, and of the output or the original.
Coefficients = tuple[float, float]


class Move(NamedTuple):
    """One UNet call and the update that follows on it."""

    #: The sigma or the timestep that the UNet is called at.
    level: float
    #: The next latents.
    latents: Combination
    #: Standard deviation of fresh noise in them; None if none is drawn.
    noise: float | None = None
    #: The sigmas between which the noise is the increment of a Brownian motion.
    interval: Interval | None = None
    #: Steps that are finished at the call, as AUTOMATIC1111 counts them; -1 and -2 are 0.
    finished: int = 0
    #: Coefficients of latents and output in the estimate.
    estimate: Coefficients = (1.0, 0.0)
    #: Weight of the output without the prompt, less the one with guidance.
    from_uncond: float = 0.0
    #: Timestep that the UNet is told; None where the level is a timestep itself.
    timestep: float | None = None
    input_scale: float = 1.0
    #: Coefficients of the image and of the latents in the estimate: it has that of the original
    #: inside the kept area.
    kept: Coefficients = (1.0, 0.0)
    #: Logarithms of the bounds of the variance that a UNet of pixels predicts.
    variance_logs: Interval = (0.0, 0.0)


def towards(ratio: float, begin: Combination = LATENTS) -> Combination:
    """*ratio* of the latents, and the rest of the estimate: a step by the ratio of its sigmas."""
    return ratio * begin + (1 - ratio) * ESTIMATES[0]


@dataclass(eq=False)
class NoiseStream:
    """One image's noise: first the noise that it starts from, then one for each call with noise.

    *factor*: pixels for each of the latents' rows; *draws*: of noise after the first. Those of a
    *brownian* motion follow from the seed alone, whatever its delta.
    """

    _seed: int
    _shape: Shape
    _settings: Noise
    _: KW_ONLY
    factor: int
    draws: int
    brownian: BrownianNoise | None = None

    def __post_init__(self) -> None:
        #: Draws the stream's noise; noise for an image that an upscaler enlarges is drawn first.
        self.draw = self._make(self._seed)
        self._tree: BrownianTree | None = None
        self._intervals = iter(self.brownian.intervals if self.brownian else ())
        self._ready = deque[Tensor]()
        self._next: Future[list[Tensor]] | None = None

    def first(self) -> Tensor:
        """Noise of variance 1 [channels, height, width]."""
        settings = self._settings
        shape = self._shape
        noise_shape = shape
        if settings.resize_from is not None:
            width, height = settings.resize_from
            noise_shape = (shape[0], height // self.factor, width // self.factor)
        draw = self.draw if noise_shape == shape else self._make(self._seed)
        noise = draw(noise_shape)
        if settings.subseed_strength:
            other = self._make(settings.subseed)(noise_shape)
            noise = _interpolate(noise, other, settings.subseed_strength)
        if noise_shape != shape:
            noise = _put_into_middle(noise, self.draw(shape))
        if settings.seed_delta:
            self.draw = self._make(self._seed + settings.seed_delta)
        if self.brownian is not None:
            self._tree = BrownianTree(
                self._seed, self.brownian.span, lambda at: self._make(at)(shape)
            )
        self._draw_ahead()
        return noise

    def fill(self, out: Tensor) -> None:
        """The next noise, into *out*."""
        if not self._ready:
            self._ready += (
                self._draw_some(1) if self._next is None else self._next.result()
            )
            self._draw_ahead()
        out.copy_(self._ready.popleft())

    def _draw_some(self, count: int) -> list[Tensor]:
        if self._tree is None:
            return [self.draw(self._shape) for _ in range(count)]
        return self._tree.noise(list(islice(self._intervals, count)))

    def _draw_ahead(self) -> None:
        self._next = None
        is_slow = self._settings.source in PHILOX or self.brownian is not None
        if self.draws and is_slow:
            count = min(self.draws, _DRAWN_AT_ONCE)
            self.draws -= count
            self._next = _AHEAD.submit(self._draw_some, count)

    def _make(self, seed: int) -> Callable[[Shape], Tensor]:
        if self._settings.source in PHILOX:
            return Philox(seed).randn
        generator = torch.Generator().manual_seed(seed % 2**64)
        return functools.partial(torch.randn, generator=generator, dtype=torch.float32)


def _interpolate(noise: Tensor, other: Tensor, strength: float) -> Tensor:
    """AUTOMATIC1111's spherical interpolation: of each column, and in float64."""
    low = noise.double()
    high = other.double()
    low_direction = low / low.norm(dim=1, keepdim=True)
    high_direction = high / high.norm(dim=1, keepdim=True)
    cosine = (low_direction * high_direction).sum(1, keepdim=True)
    if cosine.mean() > 0.9995:  # noqa: PLR2004 - as there, where the weights are exchanged, too
        return (low * strength + high * (1 - strength)).float()
    angle = cosine.acos()
    low_weight = ((1 - strength) * angle).sin()
    high_weight = (strength * angle).sin()
    turned: Tensor = (low_weight * low + high_weight * high) / angle.sin()
    return turned.float()


def _put_into_middle(noise: Tensor, into: Tensor) -> Tensor:
    """Noise of another size in the middle of *into*; a larger one of odd excess loses more."""
    to = []
    kept = []
    for length, room in zip(noise.shape[1:], into.shape[1:], strict=True):
        before = (room - length) // 2
        count = min(length, length + 2 * before)
        to.append(slice(max(0, before), max(0, before) + count))
        kept.append(slice(max(0, -before), max(0, -before) + count))
    into[:, *to] = noise[:, *kept]
    return into

"""An image's noise, from its seed alone: the same in any company and on any machine.

There are two generators: torch's on the CPU (Mersenne Twister), and Philox 4x32-10 (Salmon et al.
2011) with the Box-Muller transform, as cuRAND has it and AUTOMATIC1111's `NV`. Philox is computed
here with integers and with additions, multiplications, divisions and square roots of float64 only,
whose results IEEE 754 determines: the logarithm and the sine of libraries differ between machines
in their last bits.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from imagefleet.job.samplers import PHILOX, Noise
from worker.engine.sampler import BrownianNoise
from worker.engine.samplers.brownian import BrownianTree

Shape = tuple[int, ...]

_Numbers = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]
"""32-bit words, each in 64 bits."""

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

#: cuRAND's constant for an angle, in float32: 2 pi / 2**32.
_RADIANS = float(np.float32(2 * math.pi * 2.0**-32))

#: 1, 1/3, 1/5, ...: the inverse hyperbolic tangent's series, highest power first.
_ATANH_SERIES = tuple(1 / power for power in range(15, 0, -2))

#: The series of -sin, highest power first.
_SINE_SERIES = tuple(
    (1 if power % 4 == 3 else -1) / math.factorial(power)  # noqa: PLR2004
    for power in range(23, 0, -2)
)

#: float64's bits of the square root of 1/2, and its exponent's place.
_ROOT_HALF = np.uint64(0x3FE6A09E667F3BCD)
_MANTISSA_BITS = 52

#: Numbers computed at once: more would not stay in a core's cache, and take twice as long.
_BLOCK = 2**14

#: Draws each image's next noise while the GPU works: 0.9 ms for 512x512, which sixteen slots would
#: wait for a fifth of a tick; twenty times as much for a Brownian motion.
_AHEAD = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "noise")


class Philox:
    """One image's generator, as `torch.Generator("cuda")`: each call draws from new counters."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._calls = 0

    def randn(self, shape: Shape) -> torch.Tensor:
        numbers = np.empty(math.prod(shape), np.float32)
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK]
            block[:] = _box_muller(*philox(self._seed, self._calls, start, len(block)))
        self._calls += 1
        return torch.from_numpy(numbers.reshape(shape))


class NoiseStream:
    """One image's noise: first the noise that it starts from, then one for each call with noise."""

    def __init__(
        self,
        seed: int,
        shape: Shape,
        settings: Noise,
        *,
        factor: int,
        draws: int,
        brownian: BrownianNoise | None = None,
    ) -> None:
        """*factor*: pixels for each of the latents' rows; *draws*: of noise after the first.

        Those of a *brownian* motion follow from the seed alone, whatever its delta.
        """
        self._seed = seed
        self._shape = shape
        self._settings = settings
        self._factor = factor
        self._draws = draws
        self._draw = self._make(seed)
        self._brownian = brownian
        self._next: Future[torch.Tensor] | None = None

    def of_image(self, shape: Shape) -> torch.Tensor:
        """Noise for the image that an upscaler enlarges, drawn before all other."""
        return self._draw(shape)

    def first(self) -> torch.Tensor:
        """Noise of variance 1 [channels, height, width]."""
        settings, shape = self._settings, self._shape
        noise_shape = shape
        if settings.resize_from is not None:
            width, height = settings.resize_from
            noise_shape = (shape[0], height // self._factor, width // self._factor)
        draw = self._draw if noise_shape == shape else self._make(self._seed)
        noise = draw(noise_shape)
        if settings.subseed_strength:
            other = self._make(settings.subseed)(noise_shape)
            noise = _interpolate(noise, other, settings.subseed_strength)
        if noise_shape != shape:
            noise = _put_into_middle(noise, self._draw(shape))
        if settings.seed_delta:
            self._draw = self._make(self._seed + settings.seed_delta)
        if self._brownian is not None:
            tree = BrownianTree(self._seed, self._brownian.span, lambda at: self._make(at)(shape))
            increments = iter(self._brownian.intervals)
            self._draw = lambda _: tree.noise(*next(increments))
        self._draw_ahead()
        return noise

    def fill(self, out: torch.Tensor) -> None:
        """The next noise, into *out*."""
        if self._next is None:
            out.copy_(self._draw(self._shape))
        else:
            out.copy_(self._next.result())
            self._draw_ahead()

    def _draw_ahead(self) -> None:
        self._next = None
        is_slow = self._settings.source in PHILOX or self._brownian is not None
        if self._draws and is_slow:
            self._draws -= 1
            self._next = _AHEAD.submit(self._draw, self._shape)

    def _make(self, seed: int) -> Callable[[Shape], torch.Tensor]:
        if self._settings.source in PHILOX:
            return Philox(seed).randn
        generator = torch.Generator().manual_seed(seed % 2**64)
        return functools.partial(torch.randn, generator=generator, dtype=torch.float32)


def philox(seed: int, offset: int, start: int, count: int) -> tuple[_Words, _Words]:
    """The first two of Philox's four words at counters (offset, 0, index, 0).

    There are so many indices, from *start* on.
    """
    zeros = np.zeros(count, np.uint64)
    indices = np.arange(start, start + count, dtype=np.uint64)
    counter = [zeros + np.uint64(offset), zeros, indices, zeros.copy()]
    words = philox_words(counter, (seed & _WORD, seed >> 32))
    return words[0], words[1]


def philox_words(counter: list[_Words], key: tuple[int, int]) -> list[_Words]:
    """Philox 4x32-10 of four words of counters."""
    (even, left, odd, right), (key_even, key_odd) = counter, key
    word, half = np.uint64(_WORD), np.uint64(32)
    product_even, product_odd = np.empty_like(even), np.empty_like(odd)
    for _ in range(_ROUNDS):
        np.multiply(even, _MULTIPLIERS[0], out=product_even)
        np.multiply(odd, _MULTIPLIERS[1], out=product_odd)
        even = (product_odd >> half) ^ left ^ np.uint64(key_even)
        odd = (product_even >> half) ^ right ^ np.uint64(key_odd)
        left, right = product_odd & word, product_even & word
        key_even = (key_even + _KEY_STEPS[0]) & _WORD
        key_odd = (key_odd + _KEY_STEPS[1]) & _WORD
    return [even, left, odd, right]


def _box_muller(first: _Words, second: _Words) -> _Numbers:
    """The first of the transform's two normal numbers; the arguments are overwritten."""
    uniform = first.astype(np.float64)
    uniform *= 2.0**-32
    uniform += 2.0**-33
    radius = np.sqrt(_minus_two_log(uniform))
    angle = second.astype(np.float64)
    angle *= _RADIANS
    angle += _RADIANS / 2
    radius *= _sine(angle)
    return radius.astype(np.float32)


def _minus_two_log(numbers: _Doubles) -> _Doubles:
    """-2 log(x) = -2 exponent log(2) - 4 artanh((m - 1) / (m + 1)), with m near 1; x in (0, 1)."""
    bits = numbers.view(np.uint64)
    exponent = (bits - _ROOT_HALF).view(np.int64) >> _MANTISSA_BITS
    near_one = (bits - (exponent << _MANTISSA_BITS).view(np.uint64)).view(np.float64)
    ratio = near_one - 1
    ratio /= near_one + 1
    result = _series(_ATANH_SERIES, ratio)
    result *= -4
    scaled = exponent.astype(np.float64)
    scaled *= -2 * math.log(2)
    result += scaled
    return result


def _sine(angles: _Doubles) -> _Doubles:
    """The sine of angles from 0 to 2 pi, as that of the opposite angles, from -pi to pi."""
    angles -= math.pi
    return _series(_SINE_SERIES, angles)


def _series(coefficients: tuple[float, ...], x: _Doubles) -> _Doubles:
    """A polynomial of odd powers, by Horner's rule."""
    square = x * x
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= square
        result += coefficient
    result *= x
    return result


def _interpolate(noise: torch.Tensor, other: torch.Tensor, strength: float) -> torch.Tensor:
    """AUTOMATIC1111's spherical interpolation: of each column, and in float64."""
    low, high = noise.double(), other.double()
    cosine = ((low / low.norm(dim=1, keepdim=True)) * (high / high.norm(dim=1, keepdim=True))).sum(
        1, keepdim=True
    )
    if cosine.mean() > 0.9995:  # noqa: PLR2004 - as there, where the weights are exchanged, too
        return (low * strength + high * (1 - strength)).float()
    angle = cosine.acos()
    weights = ((1 - strength) * angle).sin(), (strength * angle).sin()
    turned: torch.Tensor = (weights[0] * low + weights[1] * high) / angle.sin()
    return turned.float()


def _put_into_middle(noise: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Noise of another size in the middle of *into*; a larger one of odd excess loses more."""
    to, kept = [], []
    for length, room in zip(noise.shape[1:], into.shape[1:], strict=True):
        before = (room - length) // 2
        count = min(length, length + 2 * before)
        to.append(slice(max(0, before), max(0, before) + count))
        kept.append(slice(max(0, -before), max(0, -before) + count))
    into[:, *to] = noise[:, *kept]
    return into

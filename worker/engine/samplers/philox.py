"""The generator of an NVIDIA GPU, on any machine: AUTOMATIC1111's noise `NV`.

Philox 4x32-10 (Salmon et al. 2011) with the Box-Muller transform, as cuRAND has it, computed by
numpy in float64 and rounded once. Its logarithm and sine may differ between processors in their
last bits: of 160,000 numbers one then has another last bit in float32.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Shape = tuple[int, ...]

#: 32-bit words, each in 64 bits.
_Words = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

#: cuRAND's constant for an angle, in float32: 2 pi / 2**32.
_RADIANS = float(np.float32(2 * math.pi * 2.0**-32))

#: Numbers computed at once: more would not stay in a core's cache, and take twice as long.
_BLOCK = 2**14


class Philox:
    """One image's generator, as `torch.Generator("cuda")`: each call draws from new counters."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._calls = 0

    def randn(self, shape: Shape) -> Tensor:
        numbers = np.empty(math.prod(shape), np.float32)
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK]
            first, second = philox(self._seed, self._calls, start, len(block))
            # The first of Box and Muller's two normal numbers.
            uniform = first * 2.0**-32 + 2.0**-33
            angle = second * _RADIANS + _RADIANS / 2
            block[:] = np.sqrt(-2 * np.log(uniform)) * np.sin(angle)
        self._calls += 1
        return torch.from_numpy(numbers.reshape(shape))


def philox(seed: int, offset: int, start: int, count: int) -> tuple[_Words, _Words]:
    """The first two of Philox 4x32-10's four words at counters (offset, 0, index, 0).

    There are so many indices, from *start* on.
    """
    even = np.full(count, offset, np.uint64)
    odd = np.arange(start, start + count, dtype=np.uint64)
    left = right = np.zeros(count, np.uint64)
    key_even = seed & _WORD
    key_odd = seed >> 32
    word = np.uint64(_WORD)
    half = np.uint64(32)
    product_even = np.empty_like(even)
    product_odd = np.empty_like(odd)
    for _ in range(_ROUNDS):
        np.multiply(even, _MULTIPLIERS[0], out=product_even)
        np.multiply(odd, _MULTIPLIERS[1], out=product_odd)
        even = (product_odd >> half) ^ left ^ np.uint64(key_even)
        odd = (product_even >> half) ^ right ^ np.uint64(key_odd)
        left = product_odd & word
        right = product_even & word
        key_even = (key_even + _KEY_STEPS[0]) & _WORD
        key_odd = (key_odd + _KEY_STEPS[1]) & _WORD
    return even, left

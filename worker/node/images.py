"""What a job's image alone says about the node: it repeats another one, or came too fast.

Neither proves anything, so both only ask for a canary at once. NaN and images of one colour are
refused before (`worker.engine.decoder`, `worker.stages.encode`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from imagefleet import likeness
from imagefleet.likeness import Fingerprint

#: Images that a new one is compared with. One fingerprint of 512x512 takes 0.8 ms, and
#: all the comparisons 0.1 ms.
RECENT = 32

#: Bit by bit the same image from different seeds, so many times: no canary proves the opposite.
MOST_COPIES = 3

#: An image that took a tenth of the time a step of the fastest canary was not drawn.
_TOO_FAST = 0.1

#: Seconds a step below which the clock and the threads decide, not the GPU.
_LEAST_STEP_SECONDS = 0.001


@dataclass(slots=True)
class ImageChecks:
    """Compares the images of one worker with each other."""

    copies: int = 0
    """Images that were exact copies of another seed's."""
    fastest_step_seconds: float | None = None
    """Seconds a step in the fastest canary, its decoding included; it had *step_pixels*."""
    step_pixels: int = 0
    _drawn: list[tuple[int, tuple[int, int]]] = field(default_factory=list, init=False)
    """Seed and size of each of the recent images, the oldest of which is replaced."""
    _recent: npt.NDArray[np.float32] = field(
        default_factory=lambda: np.zeros((RECENT, likeness.SIDE, likeness.SIDE, 4), np.float32),
        init=False,
    )
    _next: int = field(default=0, init=False)

    def canary_took(self, seconds: float, steps: int, size: tuple[int, int]) -> None:
        """Measures how fast this GPU is at best."""
        each = seconds / steps
        if self.fastest_step_seconds is None or each < self.fastest_step_seconds:
            self.fastest_step_seconds, self.step_pixels = each, size[0] * size[1]

    def repetition(self, found: Fingerprint, seed: int, size: tuple[int, int]) -> str | None:
        """Whether an image is one that another seed had: of one seed, jobs may be the same."""
        differences = self._recent[: len(self._drawn), ..., :3] - found[..., :3]
        squares = np.einsum("iyxc,iyxc->i", differences, differences)
        comparable = [
            (square, at)
            for at, (square, drawn) in enumerate(zip(squares, self._drawn, strict=True))
            if drawn[0] != seed and drawn[1] == size
        ]
        _, nearest = min(comparable, default=(0.0, None))
        said = None
        if nearest is not None and likeness.repeats(found, self._recent[nearest]):
            self.copies += bool(np.array_equal(found, self._recent[nearest]))
            said = f"the image of seed {seed} is the same as that of seed {self._drawn[nearest][0]}"
        self._drawn[self._next : self._next + 1] = [(seed, size)]
        self._recent[self._next] = found
        self._next = (self._next + 1) % RECENT
        return said

    def haste(self, seconds: float, steps: int, size: tuple[int, int]) -> str | None:
        """Whether an image came faster than this GPU can draw."""
        if self.fastest_step_seconds is None or not steps:
            return None
        smaller = min(1.0, size[0] * size[1] / self.step_pixels)
        least = self.fastest_step_seconds * smaller * _TOO_FAST
        if least < _LEAST_STEP_SECONDS * _TOO_FAST or seconds / steps >= least:
            return None
        return (
            f"an image of {steps} steps came in {1000 * seconds:.3g} ms, a tenth of what a canary"
            " takes"
        )

"""Which end of a schedule img2img and the second pass of hires fix take, as in AUTOMATIC1111.

`t_enc` is the number of the step, from the end, whose noise the image gets: see
`sampler.make_schedule`.
"""

from __future__ import annotations

from typing import NamedTuple

from imagefleet import errors

#: AUTOMATIC1111's limit: at 1, img2img would take one step more than there are.
_MOST_STRENGTH = 0.999

#: A second pass lengthens the schedule instead of shortening itself; DDIM has no more timesteps.
_MOST_STEPS = 1000


class Steps(NamedTuple):
    """The end of a schedule."""

    steps: int
    """The number of steps of the whole schedule."""
    t_enc: int


def img2img(steps: int, denoising_strength: float) -> Steps:
    """A job's *steps* at full strength, and fewer at less.

    Raises:
        JobError: the strength is not between 0 and 1.
    """
    return Steps(steps, int(_limited(denoising_strength) * steps))


def second_pass(steps: int, denoising_strength: float) -> Steps:
    """A second pass of so many *steps* at any strength; none at 0.

    Raises:
        JobError: the strength is not between 0 and 1, or too small for so many steps.
    """
    strength = _limited(denoising_strength)
    if strength == 0:
        return Steps(0, 0)
    if steps / strength > _MOST_STEPS:
        raise errors.JobError(
            f"denoising_strength {denoising_strength:g} is too small for a second pass of {steps}"
            f" steps: they would be the last of {steps / strength:.0f} steps, more than the model's"
            f" {_MOST_STEPS} timesteps"
        )
    return Steps(int(steps / strength), steps - 1)


def _limited(strength: float) -> float:
    if not 0 <= strength <= 1:
        raise errors.JobError(f"denoising_strength is {strength:g}: it must be between 0 and 1")
    return min(strength, _MOST_STRENGTH)

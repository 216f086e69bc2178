"""The ControlNets of one request: their images, and their weights at each call of the UNet.

A ControlNet works in the steps that sd-webui-controlnet gives it: where the number of finished
steps, as AUTOMATIC1111's `state.sampling_step` counts them (0 in the first two, 1 in the third), is
between *start* and *end* times all steps of the pass, both included. diffusers compares other
numbers, and so may differ by a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image, ImageOps

from imagefleet import errors
from worker.engine import contract
from worker.engine.files.safetensors import Identity

#: The most ControlNets of one request, as many as sd-webui-controlnet shows at first.
MOST_CONTROLS = 3

#: An image of so few colours is a map of classes, which must not mix.
_FEWEST_COLOURS, _MANY_COLOURS = 2, 200


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedControl:
    """A ControlNet of a request, ready for the engine."""

    identity: Identity
    pixels: contract.Pixels = field(repr=False)
    weights: tuple[float, ...]
    """The ControlNet's weight at each call of the UNet."""


def prepare(
    controls: Sequence[tuple[Identity, contract.Control]],
    size: tuple[int, int],
    sampler: str,
    calls: int,
    steps: int,
) -> tuple[PreparedControl, ...]:
    """A pass' ControlNets that have any effect, in an order that depends on their files alone.

    *size*: width and height in pixels; *calls* of the UNet in so many *steps*. Raises JobError if
    there are too many, or an image has another size.
    """
    prepared = [
        PreparedControl(identity, control.pixels, weights(control, sampler, calls, steps))
        for identity, control in controls
    ]
    prepared = [each for each in prepared if any(each.weights)]
    if len(prepared) > MOST_CONTROLS:
        raise errors.JobError(
            f"the job has {len(prepared)} ControlNets; at most {MOST_CONTROLS} work at once"
        )
    for _, control in controls:
        if control.pixels.shape != (size[1], size[0], 3):
            raise errors.JobError(
                f"the image for the ControlNet {control.name!r} does not have"
                f" {size[0]}x{size[1]} pixels"
            )
    return tuple(sorted(prepared, key=lambda each: each.identity))


def weights(control: contract.Control, sampler: str, calls: int, steps: int) -> tuple[float, ...]:
    """The weight at each of a pass' *calls* of the UNet; 0 outside of its steps."""
    # PLMS calls the UNet twice in its first step.
    behind = 2 if sampler == "plms" else 1
    shares = [max(0, call - behind) / max(1, steps) for call in range(calls)]
    return tuple(
        control.weight if control.start <= share <= control.end else 0.0 for share in shares
    )


def for_second_pass(control: contract.Control, width: int, height: int) -> contract.Control:
    """Resizes its image to a second pass, and cuts it to its shape, as sd-webui-controlnet does.

    There the image that was given is resized to either pass.
    """
    if control.pixels.shape[:2] == (height, width):
        return control
    image = Image.fromarray(control.pixels)
    colours = len(image.getcolors(_MANY_COLOURS) or ())
    is_map = _FEWEST_COLOURS < colours < _MANY_COLOURS
    how = Image.Resampling.NEAREST if is_map else Image.Resampling.BICUBIC
    return replace(control, pixels=np.asarray(ImageOps.fit(image, (width, height), how)))

"""Draws a checkpoint's images on this machine: one to look at, before it is stored."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fleet import console
from imagefleet import errors
from worker.engine import contract
from worker.files import check

PROMPT = "a red house in a forest, digital art"

#: Steps of a preview: on a CPU a whole image of SD1.5 would take minutes.
_CPU_STEPS, _GPU_STEPS = 8, 20
_CPU_SIDE = 256


def can_draw() -> bool:
    """Whether the libraries of the extra `worker` are installed."""
    return importlib.util.find_spec("torch") is not None


def draw(model: Path, target: Path) -> dict[str, object]:
    """Loads the checkpoint, draws one image and writes it as a PNG; returns facts about it.

    Raises:
        SetupError: the checkpoint cannot be loaded, or draws nothing but one colour.
    """
    from PIL import Image

    from worker.engine import device as devices
    from worker.engine import load
    from worker.inputs import img2img
    from worker.stages import encode

    began = time.monotonic()
    device = devices.find_device("auto").type
    on_cpu = device == "cpu"
    engine = load.load_any_engine(
        model, slots=1, compile="off", prediction_type=check.prediction_type(model)
    )
    width, height = (min(side, _CPU_SIDE) if on_cpu else side for side in engine.default_size)
    request = contract.ImageRequest(
        prompt=PROMPT,
        negative_prompt="",
        loras=(),
        sampler="euler_ancestral",
        steps=_CPU_STEPS if on_cpu else _GPU_STEPS,
        cfg_scale=7.0,
        seed=1,
        width=width,
        height=height,
        init=img2img.sample(engine.family, width, height),
    )
    (pixels,) = finish(model, engine, [request])
    try:
        encode.refuse_one_colour(pixels)
    except errors.FleetError as error:
        raise _useless(model, error) from error
    Image.fromarray(pixels).save(target)
    seconds = time.monotonic() - began
    console.print_note(
        f"test image: {target} ({width}x{height}, {request.steps} steps on {device},"
        f" {seconds:.0f} s with loading)"
    )
    facts = {"device": device, "width": width, "height": height, "steps": request.steps}
    return {"path": str(target), **facts, "seconds": seconds}


def finish(
    model: Path,
    engine: contract.Engine,
    requests: Sequence[contract.ImageRequest],
    on_step: Callable[[], None] = lambda: None,
) -> list[contract.Pixels]:
    """Draws images at once and closes the engine; raises SetupError if one fails."""
    outcomes: dict[int, contract.Outcome] = {}
    try:
        for ticket, request in enumerate(requests):
            engine.admit(ticket, engine.prepare(request))
        while engine.busy:
            outcomes |= {finished.ticket: finished.outcome for finished in engine.tick()}
            on_step()
        engine.close()
    except errors.FleetError as error:
        raise _useless(model, error) from error
    pixels = []
    for ticket in range(len(requests)):
        outcome = outcomes[ticket]
        if isinstance(outcome, errors.FleetError):
            raise _useless(model, outcome) from outcome
        pixels.append(outcome)
    return pixels


def _useless(model: Path, error: errors.FleetError) -> errors.SetupError:
    return errors.SetupError(f"{str(model)!r} loads, but draws no image: {error.message}")

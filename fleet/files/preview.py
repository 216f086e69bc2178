"""One image of a checkpoint, drawn on this machine."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

from imagefleet import errors
from worker.files import check

PROMPT = "a red house in a forest, digital art"

#: Steps of a preview: on a CPU a whole image of SD1.5 would take minutes.
_CPU_STEPS, _GPU_STEPS = 8, 20
_CPU_SIDE = 256


@dataclass(frozen=True, slots=True)
class Preview:
    """A drawn image and how it was made."""

    path: Path
    device: str
    width: int
    height: int
    steps: int
    seconds: float


def can_draw() -> bool:
    """Whether the libraries of the extra `worker` are installed."""
    return importlib.util.find_spec("torch") is not None


def draw(model: Path, target: Path) -> Preview:
    """Loads the checkpoint, draws one image and writes it as a PNG.

    Raises:
        SetupError: the checkpoint cannot be loaded, or draws nothing but one colour.
    """
    from PIL import Image

    from worker.engine import contract, load
    from worker.engine import device as devices
    from worker.inputs import sample
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
        init=sample.init_of(engine.family, width, height),
    )
    try:
        engine.admit(0, engine.prepare(request))
        finished: list[contract.Finished] = []
        while engine.busy and not finished:
            finished = list(engine.tick())
        engine.close()
        outcome = finished[0].outcome
        if isinstance(outcome, errors.FleetError):
            raise outcome
        encode.refuse_one_colour(outcome)
    except errors.FleetError as error:
        raise errors.SetupError(
            f"{str(model)!r} loads, but draws no image: {error.message} (--no-test skips this)"
        ) from error
    Image.fromarray(outcome).save(target)
    seconds = time.monotonic() - began
    return Preview(target, device, width, height, request.steps, seconds)

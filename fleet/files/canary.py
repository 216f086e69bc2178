"""A checkpoint's reference images, drawn on this machine, for the nodes' checks of themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fleet import console
from fleet.files import preview
from fleet.files.transfer import Report
from imagefleet import errors, likeness
from imagefleet.likeness import Fingerprint
from worker.files import check
from worker.node import libraries, reference
from worker.node.reference import CanaryImage, Reference

if TYPE_CHECKING:
    from worker.engine.device import Precision  # loads torch

#: Drawn in both, which tells how far right images of this checkpoint are apart.
_PRECISIONS: Mapping[str, tuple[Precision, Precision]] = {
    "cuda": ("float16", "bfloat16"),
    "cpu": ("float32", "bfloat16"),
}

#: Pixels of an image that a CPU draws within a minute or so.
_SOON_ON_CPU = 512 * 512

#: A tolerance is so many times what the two precisions differ by.
_MARGIN = 2.0


def make(model: Path) -> Report:
    """Draws a checkpoint's reference images into a file beside it; raises SetupError as `draw`."""
    libraries.require()
    check.check_path(model)
    found = draw(model, console.print_note)
    target = reference.beside(model)
    console.write_file(target, encode(found))
    note = (
        f"the reference images of {found.width}x{found.height}; wrong from a distance of"
        f" {found.tolerance:g} on:"
    )
    facts = found.model_dump(exclude={"images"})
    return Report({"path": str(target), **facts}, [note], [str(target)])


def draw(model: Path, on_note: Callable[[str], None]) -> Reference:
    """Draws a checkpoint's reference images, in two precisions.

    Raises:
        SetupError: it cannot be loaded, or its images say nothing.
    """
    from worker.engine import device as devices

    device = devices.find_device("auto").type
    drawn = [_draw(model, precision, device, on_note) for precision in _PRECISIONS[device]]
    (weights, size, images), (_, _, others) = drawn
    apart = max(likeness.distance(images[kind], others[kind]) for kind in reference.CANARY_IMAGES)
    tolerance = max(likeness.SAME_BELOW, _MARGIN * apart)
    nearest = min(
        likeness.distance(images["with_lora"], images[kind])
        for kind in ("other_seed", "without_lora")
    )
    if tolerance > min(reference.MAX_TOLERANCE, nearest):
        raise errors.SetupError(
            f"{str(model)!r} has no use for reference images: right ones differ by {apart:.1f} from"
            f" one precision to another, and wrong ones by {nearest:.1f}"
        )
    return Reference(
        version=reference.VERSION,
        weights=weights,
        width=size[0],
        height=size[1],
        steps=reference.STEPS,
        tolerance=round(tolerance, 1),
        images={kind: likeness.to_text(image) for kind, image in images.items()},
    )


def encode(found: Reference) -> bytes:
    """The content of a reference file."""
    return (found.model_dump_json(indent=1) + "\n").encode()


def _draw(
    model: Path, precision: Precision, device: str, on_note: Callable[[str], None]
) -> tuple[str, tuple[int, int], dict[CanaryImage, Fingerprint]]:
    """The weights' identity, the images' size and their fingerprints."""
    from worker.engine import load

    engine = load.load_engine(
        load.EngineSettings(
            model,
            slots=len(reference.CANARY_IMAGES),
            precision=precision,
            compile="off",
            prediction_type=check.prediction_type(model),
        )
    )
    if (self_check := engine.self_check) is None:
        engine.close()
        raise errors.SetupError(
            f"{str(model)!r} enlarges images: nodes do not compare what such models draw"
        )
    width, height = engine.default_size
    # A node compares at the size that it draws at: a smaller one would say nothing of SDXL.
    takes_long = device == "cpu" and width * height > _SOON_ON_CPU
    on_note(
        f"drawing {len(reference.CANARY_IMAGES)} reference images of {width}x{height} in"
        f" {precision} on the {device}"
        + ("; at this size that takes minutes" if takes_long else "")
    )
    with tempfile.TemporaryDirectory() as folder:
        lora = Path(folder, "canary.safetensors")
        self_check.write_lora(lora)
        requests = [
            reference.request(image, (width, height), lora) for image in reference.CANARY_IMAGES
        ]
        with console.counting("steps", reference.STEPS) as on_step:
            drawn = preview.finish(model, engine, requests, on_step)
    found = zip(reference.CANARY_IMAGES, map(likeness.fingerprint, drawn), strict=True)
    return self_check.weights_id, (width, height), dict(found)

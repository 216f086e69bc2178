"""What is made of a model on this machine: a test image, its nodes' reference images, kernels."""

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from cli import console
from fleet.files import stored
from fleet.files.stored import Report
from imagefleet import errors, likeness
from imagefleet.likeness import Fingerprint
from imagefleet.storage.open import open_storage
from worker.accelerator import is_unguided
from worker.engine import contract, load
from worker.files import check, model
from worker.files.kernels import archive
from worker.node import reference
from worker.node.reference import CanaryImage, Reference
from worker.settings import WorkerSettings, require_libraries

#: Drawn in both, which tells how far right images of this checkpoint are apart.
_PRECISIONS = {
    "cuda": ("float16", "bfloat16"),
    "cpu": ("float32", "bfloat16"),
}

#: A tolerance is so many times what the two precisions differ by.
_MARGIN = 2.0


def can_draw() -> bool:
    """Whether the libraries of the extra `worker` are installed."""
    return importlib.util.find_spec("torch") is not None


def _engine(model: Path, **settings: Any) -> contract.Engine:
    found = check.prediction_type(model)
    return load.load_engine(
        load.EngineSettings(model, prediction_type=found, **settings)
    )


def test_image(model: Path, target: Path) -> dict[str, object]:
    """Draws one image as a PNG; returns facts about it. Raises SetupError if it is one colour."""
    from worker.node.check import (
        plain_request,
    )  # needs the extra `worker`, as does the next
    from worker.stages import encode

    began = time.monotonic()
    engine = _engine(model, slots=1, compile="off")
    request = plain_request(engine, seed=1)
    (pixels,) = finish(model, engine, [request])
    with _drawing(model):
        encode.refuse_one_colour(pixels)
    Image.fromarray(pixels).save(target)
    seconds = time.monotonic() - began
    facts = {"width": request.width, "height": request.height, "steps": request.steps}
    console.print_note(
        f"test image: {target} ({request.width}x{request.height}, {request.steps} steps,"
        f" {seconds:.0f} s with loading)"
    )
    return {"path": str(target), **facts, "seconds": seconds}


def make_canary(model: Path) -> Report:
    """Draws a checkpoint's reference images into a file beside it; raises as `canary`."""
    require_libraries()
    check.check_path(model)
    found = canary(model)
    target = reference.beside(model)
    console.write_file(target, encode(found))
    note = (
        f"the reference images of {found.width}x{found.height}; wrong from a distance of"
        f" {found.tolerance:g} on:"
    )
    facts = found.model_dump(exclude={"images"})
    return Report({"path": str(target), **facts}, [note], [str(target)])


def canary(model: Path) -> Reference:
    """Draws a checkpoint's reference images in two precisions; raises SetupError if it cannot."""
    from worker.engine import device as devices

    device = devices.find_device("auto").type
    drawn = [_draw(model, precision, device) for precision in _PRECISIONS[device]]
    (weights, size, images), (_, _, others) = drawn
    apart = max(
        likeness.distance(images[kind], others[kind])
        for kind in reference.CANARY_IMAGES
    )
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
    model: Path, precision: str, device: str
) -> tuple[str, tuple[int, int], dict[CanaryImage, Fingerprint]]:
    """The weights' identity, the images' size and their fingerprints."""
    slots = len(reference.CANARY_IMAGES)
    engine = _engine(model, slots=slots, precision=precision, compile="off")
    if (self_check := engine.self_check) is None:
        engine.close()
        raise errors.SetupError(
            f"{str(model)!r} enlarges images: nodes do not compare what such models draw"
        )
    width, height = engine.default_size
    # A node compares at the size that it draws at: a smaller one would say nothing of SDXL.
    size = f"{width}x{height}"
    console.print_note(
        f"drawing {slots} reference images of {size} in {precision} on the {device}"
    )
    with tempfile.TemporaryDirectory() as folder:
        lora = Path(folder, "canary.safetensors")
        self_check.write_lora(lora)
        requests = [
            reference.request(image, (width, height), lora)
            for image in reference.CANARY_IMAGES
        ]
        with console.counting("steps", reference.STEPS) as on_step:
            drawn = finish(model, engine, requests, on_step)
    found = zip(reference.CANARY_IMAGES, map(likeness.fingerprint, drawn), strict=True)
    return self_check.weights_id, (width, height), dict(found)


def finish(
    model: Path,
    engine: contract.Engine,
    requests: Sequence[contract.ImageRequest],
    on_step: Callable[[], None] = lambda: None,
) -> list[contract.Pixels]:
    """Draws images at once and closes the engine; raises SetupError if one fails."""
    outcomes: dict[int, contract.Outcome] = {}
    pixels = []
    with _drawing(model):
        for ticket, request in enumerate(requests):
            engine.admit(ticket, engine.prepare(request))
        while engine.busy:
            outcomes |= {
                finished.ticket: finished.outcome for finished in engine.tick()
            }
            on_step()
        engine.close()
        for _, outcome in sorted(outcomes.items()):
            if isinstance(outcome, errors.FleetError):
                raise outcome
            pixels.append(outcome)
    return pixels


@contextlib.contextmanager
def _drawing(model: Path) -> Iterator[None]:
    try:
        yield
    except errors.FleetError as error:
        raise errors.SetupError(
            f"{str(model)!r} loads, but draws no image: {error.message}"
        ) from error


def make_kernels(settings: WorkerSettings, output: Path, *, dry_run: bool) -> Report:
    """Compiles kernels as a worker does and packs them into one file; raises SetupError."""
    require_libraries()
    from worker.files.kernels import cache

    check.check(settings)
    if not Path(settings.model).expanduser().exists():
        settings = console.run(_fetch_model(settings))
    key = None
    if settings.compile != "off":
        key = cache.find_key(model.local_path(settings), settings.device)
    if key is None:
        raise errors.SetupError(
            "kernels are compiled for NVIDIA GPUs, and here is none that torch can use: run this on"
            " a machine with the GPU of the workers, without --device cpu and --compile off"
        )
    folder = cache.use_folder(settings.cache, key)
    target = output / f"{key.name}{archive.SUFFIX}"
    document = {"path": str(target), "key": asdict(key)}
    if dry_run:
        note = "would compile for this GPU and write"
        return Report({**document, "bytes": None}, [note], [str(target)])
    console.print_note("compiling for this GPU: a minute or two, once")
    _compile(settings, folder)
    try:
        with stored.showing("packing") as show:
            files = archive.pack(folder, key, target, show)
        size = target.stat().st_size
    except OSError as error:
        raise errors.SetupError(
            f"{target} cannot be written: {error.strerror or error}; give another --output"
        ) from None
    note = f"{files} files, {size / 1e6:,.1f} MB:"
    return Report({**document, "bytes": size}, [note], [str(target)])


async def _fetch_model(settings: WorkerSettings) -> WorkerSettings:
    async with open_storage(settings) as storage:
        return await model.fetch(settings, storage.files)


def _compile(settings: WorkerSettings, folder: Path) -> None:
    """Compiles into the *folder*; raises SetupError if torch has kept nothing."""
    path = model.local_path(settings)
    check.check_path(path)
    names = (
        "device",
        "precision",
        "config",
        "taesd",
        "slots",
        "fp16_accumulate",
        "file_positions",
    )
    own = {name: getattr(settings, name) for name in names}
    _engine(path, compile="auto", is_unguided=is_unguided(settings), **own).close()
    if not any(folder.glob("fxgraph/*/*/*")):
        raise errors.SetupError(
            f"torch kept no kernels in {folder}: it could not compile (the warnings above say why),"
            " or a TORCHINDUCTOR variable turns its caches off"
        )

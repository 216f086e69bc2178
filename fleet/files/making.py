"""Makes a test image or kernels of a model on this machine."""

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from cli import console
from fleet.files import stored
from fleet.files.stored import Report
from imagefleet import errors
from imagefleet.storage.open import open_storage
from worker.accelerator import is_unguided
from worker.engine import contract, load
from worker.files import check, model
from worker.files.kernels import archive
from worker.settings import WorkerSettings, require_libraries


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
    # Both need the extra `worker`.
    from worker.node.start_up import plain_request
    from worker.stages import encode

    began = time.monotonic()
    engine = _engine(model, slots=1, compile="off")
    request = plain_request(engine, seed=1)
    finished: list[contract.Finished] = []
    with _drawing(model):
        engine.admit(0, engine.prepare(request))
        while engine.busy:
            finished += engine.tick()
        engine.close()
        outcome = finished[0].outcome
        if isinstance(outcome, errors.FleetError):
            raise outcome
        encode.refuse_one_colour(outcome)
    Image.fromarray(outcome).save(target)
    seconds = time.monotonic() - began
    facts = {"width": request.width, "height": request.height, "steps": request.steps}
    console.print_note(
        f"test image: {target} ({request.width}x{request.height}, {request.steps} steps,"
        f" {seconds:.0f} s with loading)"
    )
    return {"path": str(target), **facts, "seconds": seconds}


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

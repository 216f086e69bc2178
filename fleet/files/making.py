"""Makes kernels of a model on this machine."""

from dataclasses import asdict
from pathlib import Path

from cli import console
from fleet.files import stored
from fleet.files.stored import Report
from imagefleet import errors
from imagefleet.storage.open import open_storage
from worker.accelerator import is_unguided
from worker.engine import load
from worker.files import check, model
from worker.files.kernels import archive
from worker.settings import WorkerSettings, require_libraries


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
    )
    own = {name: getattr(settings, name) for name in names}
    engine_settings = load.EngineSettings(
        path,
        prediction_type=check.prediction_type(path),
        compile="auto",
        is_unguided=is_unguided(settings),
        **own,
    )
    load.load_engine(engine_settings).close()
    if not any(folder.glob("fxgraph/*/*/*")):
        raise errors.SetupError(
            f"torch kept no kernels in {folder}: it could not compile (the warnings above say why),"
            " or a TORCHINDUCTOR variable turns its caches off"
        )

"""Compiled kernels: compiled once on a GPU and packed, or checked before they are stored."""

from __future__ import annotations

from pathlib import Path

from fleet import console
from fleet.files import transfer
from fleet.files.transfer import Ready
from fleet.worker.command import require_libraries
from imagefleet import errors
from imagefleet.storage.open import open_storage
from worker.files import check, model
from worker.files.kernels import archive
from worker.files.kernels.key import Key
from worker.settings import WorkerSettings


def archives(sources: list[str]) -> list[Ready]:
    """The archives among *sources*, and those in the folders, checked.

    Raises:
        SetupError: there is none in a folder, or one is damaged.
    """
    found: list[Ready] = []
    for source in map(Path, sources):
        if not source.exists():
            raise errors.SetupError(f"{str(source)!r} does not exist")
        inside = sorted(source.glob(f"*{archive.SUFFIX}")) if source.is_dir() else [source]
        if not inside:
            raise errors.SetupError(
                f"there is no {archive.SUFFIX} in {str(source)!r}: `imagefleet files make kernels`"
                " writes one"
            )
        for path in inside:
            try:
                key = archive.check(path).key
            except archive.UnusableArchiveError as error:
                raise errors.SetupError(error.message) from None
            found.append(
                Ready(path, f"{key.name}{archive.SUFFIX}", f"{key.gpu}, torch {key.torch}")
            )
    return found


def place(settings: WorkerSettings) -> tuple[WorkerSettings, Key, Path]:
    """The settings once their model is on this machine, its key, and the folder of its kernels.

    Raises:
        SetupError: the engine cannot load the model, or nothing is compiled here.
    """
    require_libraries()
    from worker.files.kernels import cache, machine

    check.check(settings)
    if not Path(settings.model).expanduser().exists():
        settings = console.run(_fetch_model(settings))
    key = None
    if settings.compile != "off":
        key = machine.find_key(model.local_path(settings), settings.device)
    if key is None:
        raise errors.SetupError(
            "kernels are compiled for NVIDIA GPUs, and here is none that torch can use: run this on"
            " a machine with the GPU of the workers, without --device cpu and --compile off"
        )
    return settings, key, cache.use_folder(settings.cache, key)


async def _fetch_model(settings: WorkerSettings) -> WorkerSettings:
    async with open_storage(settings) as storage:
        settings = await model.pinned(settings, storage.files)
        await model.fetch(settings, storage.files)
    return settings


def make(settings: WorkerSettings, key: Key, folder: Path, target: Path) -> archive.Header:
    """Compiles kernels into *folder* as a worker does with these settings, and packs them.

    Raises:
        SetupError: torch has kept nothing, or the *target* cannot be written.
    """
    from worker.engine.load import load_engine

    path = model.local_path(settings)
    check.check_path(path)
    load_engine(
        path,
        settings.device,
        precision=settings.precision,
        config=settings.config,
        prediction_type=check.prediction_type(path),
        slots=settings.slots,
        compile="auto",
        fp16_accumulate=settings.fp16_accumulate,
    ).close()
    if not any(folder.glob("fxgraph/*/*/*")):
        raise errors.SetupError(
            f"torch kept no kernels in {folder}: it could not compile (the warnings above say why),"
            " or a TORCHINDUCTOR variable turns its caches off"
        )
    try:
        with transfer.showing("packing") as show:
            return archive.pack(folder, key, target, show)
    except OSError as error:
        raise errors.SetupError(
            f"{target} cannot be written: {error.strerror or error}; give another --output"
        ) from None

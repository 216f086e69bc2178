"""Compiled kernels: compiled once on a GPU and packed, or checked before they are stored."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fleet import console
from fleet.files import transfer
from fleet.files.transfer import Ready, Report
from imagefleet import errors
from imagefleet.storage.open import open_storage
from worker.files import check, model
from worker.files.kernels import archive
from worker.node import libraries
from worker.settings import WorkerSettings


def archives(sources: list[str]) -> list[Ready]:
    """The archives in *sources*, checked; raises SetupError for damaged ones or none."""
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
                key, _ = archive.check(path)
            except archive.UnusableArchiveError as error:
                raise errors.SetupError(error.message) from None
            found.append(
                Ready(path, f"{key.name}{archive.SUFFIX}", f"{key.gpu}, torch {key.torch}")
            )
    return found


def make(settings: WorkerSettings, output: Path, *, dry_run: bool) -> Report:
    """Compiles kernels as a worker does with these settings, and packs them into one file.

    Raises:
        SetupError: the engine cannot load the model, nothing is compiled here, or *output* cannot
        be written.
    """
    libraries.require()
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
    folder = cache.use_folder(settings.cache, key)
    target = output / f"{key.name}{archive.SUFFIX}"
    document = {"path": str(target), "key": asdict(key)}
    if dry_run:
        note = "would compile for this GPU and write"
        return Report({**document, "bytes": None}, [note], [str(target)])
    console.print_note("compiling for this GPU: a minute or two, once")
    _compile(settings, folder)
    try:
        with transfer.showing("packing") as show:
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
        settings = await model.pinned(settings, storage.files)
        await model.fetch(settings, storage.files)
    return settings


def _compile(settings: WorkerSettings, folder: Path) -> None:
    """Compiles into the *folder*; raises SetupError if torch has kept nothing."""
    from worker.engine.load import EngineSettings, load_engine

    path = model.local_path(settings)
    check.check_path(path)
    load_engine(
        EngineSettings(
            path,
            settings.device,
            precision=settings.precision,
            config=settings.config,
            prediction_type=check.prediction_type(path),
            slots=settings.slots,
            compile="auto",
            fp16_accumulate=settings.fp16_accumulate,
        )
    ).close()
    if not any(folder.glob("fxgraph/*/*/*")):
        raise errors.SetupError(
            f"torch kept no kernels in {folder}: it could not compile (the warnings above say why),"
            " or a TORCHINDUCTOR variable turns its caches off"
        )

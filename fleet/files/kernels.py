"""`imagefleet kernels`: compiled once on a GPU, then fetched by every worker with the same one."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fleet import console, options
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from imagefleet.storage.protocol import Storage
    from worker.files.kernels.archive import Header
    from worker.files.kernels.key import Key

FOLDER = "kernels"

Change = Literal["stored", "replaced", "was there"]

app = typer.Typer(
    no_args_is_help=True,
    help="Compiled kernels, which spare workers a minute or two of compiling at their start.",
)


@app.command("build")
@options.from_settings(WorkerSettings)
def build_command(
    settings: WorkerSettings,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the file is written.")
    ] = Path(FOLDER),
    dry_run: Annotated[bool, options.dry_run("the file's name, which says what it is for")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Compiles for this machine's GPU and packs the kernels as one file.

    Takes a worker's settings; what that worker has compiled into --cache is packed as well. The
    file is for workers with the same GPU, major version of the driver, torch, imagefleet and kind
    of model. `kernels push` stores it for them; or put it into their image, with --kernels.

    imagefleet kernels build --model ./model
    """
    from fleet.worker.command import require_libraries
    from worker.files.kernels import archive

    require_libraries()
    if not _is_here(settings):
        settings = console.run(_fetch_model(settings))
    key, folder = _place(settings)
    target = output / f"{key.name}{archive.SUFFIX}"
    if dry_run:
        header = None
        console.print_note("would compile for this GPU and write")
    else:
        console.print_note("compiling for this GPU: a minute or two, once")
        _compile(settings, folder)
        header = _pack(folder, key, target)
        console.print_note(f"{header.files} files, {target.stat().st_size / 1e6:,.1f} MB:")
    if as_json:
        size = None if header is None else target.stat().st_size
        console.print_json({"path": str(target), "key": asdict(key), "bytes": size})
    else:
        console.print_plain(str(target))


@app.command("push")
@options.from_settings(SignerSettings)
def push_command(
    settings: SignerSettings,
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="What `kernels build` wrote, or folders of it."),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Put them in the place of others for the same GPU.")
    ] = False,
    dry_run: Annotated[bool, options.dry_run("what would be stored")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Puts compiled kernels into the storage, from which workers fetch them at their start.

    Kernels are programs: push only what you have built yourself, on a machine that you trust. Their
    hashes are listed in kernels/manifest.json, with a signing key signed.

    imagefleet kernels push kernels --dry-run

    imagefleet kernels push kernels
    """
    from worker.files.kernels import archive

    files = list(_archives(sources))
    headers = {path: _checked(path) for path in files}

    async def push() -> list[dict[str, object]]:
        async with open_storage(settings) as storage:
            if not dry_run:
                await storage.create()
            rows: list[dict[str, object]] = []
            for path, header in headers.items():
                blob = f"{FOLDER}/{header.key.name}{archive.SUFFIX}"
                change, sha256 = await _store(
                    settings, storage, path, header, blob, replace=replace, dry_run=dry_run
                )
                size = path.stat().st_size
                rows.append({"blob": blob, "change": change, "bytes": size, "sha256": sha256})
            return rows

    rows = console.run(push())
    if as_json:
        console.print_json({"kernels": rows, "dry_run": dry_run})
        return
    for row in rows:
        would = "would be " if dry_run and row["change"] != "was there" else ""
        console.print_plain(f"{row['blob']}: {would}{row['change']}")


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the compiled kernels in the storage.

    imagefleet kernels list
    """
    from fleet.files import listing
    from worker.files.kernels import archive

    if_empty = "no kernels in the storage: `imagefleet kernels push` stores them"
    listing.show(settings, FOLDER, archive.SUFFIX, if_empty=if_empty, as_json=as_json)


def _is_here(settings: WorkerSettings) -> bool:
    """Whether the model is a path; raises SetupError for one that the engine cannot load."""
    from worker.files import check

    check.check(settings)
    return Path(settings.model).expanduser().exists()


async def _fetch_model(settings: WorkerSettings) -> WorkerSettings:
    from worker.files import model

    async with open_storage(settings) as storage:
        pinned = await model.pinned(settings, storage.files)
        await model.fetch(pinned, storage.files)
    return pinned


def _place(settings: WorkerSettings) -> tuple[Key, Path]:
    """This machine's key, and the folder of its kernels.

    Raises:
        SetupError: nothing is compiled here.
    """
    from worker.files import model
    from worker.files.kernels import cache
    from worker.files.kernels.machine import find_key

    key = None
    if settings.compile != "off":
        key = find_key(model.local_path(settings), settings.device)
    if key is None:
        raise errors.SetupError(
            "kernels are compiled for NVIDIA GPUs, and here is none that torch can use: run this on"
            " a machine with the GPU of the workers, without --device cpu and --compile off"
        )
    return key, cache.use_folder(settings.cache, key)


def _compile(settings: WorkerSettings, folder: Path) -> None:
    """Compiles kernels as a worker does with these settings.

    Raises:
        SetupError: torch has kept nothing.
    """
    from worker.engine.load import load_engine
    from worker.files import check, model

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


def _pack(folder: Path, key: Key, target: Path) -> Header:
    from fleet.files import transfer
    from worker.files.kernels import archive

    try:
        with transfer.showing("packing") as show:
            return archive.pack(folder, key, target, show)
    except OSError as error:
        raise errors.SetupError(
            f"{target} cannot be written: {error.strerror or error}; give another --output"
        ) from None


def _archives(sources: list[Path]) -> list[Path]:
    """The files, and those in the folders; raises SetupError for what has none."""
    from worker.files.kernels import archive

    found: list[Path] = []
    for source in sources:
        if not source.exists():
            raise errors.SetupError(f"{str(source)!r} does not exist")
        inside = sorted(source.glob(f"*{archive.SUFFIX}")) if source.is_dir() else [source]
        if not inside:
            raise errors.SetupError(
                f"there is no {archive.SUFFIX} in {str(source)!r}: `imagefleet kernels build`"
                " writes one"
            )
        found += inside
    return found


def _checked(path: Path) -> Header:
    from worker.files.kernels import archive

    try:
        return archive.check(path)
    except archive.UnusableArchiveError as error:
        raise errors.SetupError(error.message) from None


async def _store(
    settings: SignerSettings,
    storage: Storage,
    path: Path,
    header: Header,
    blob: str,
    *,
    replace: bool,
    dry_run: bool,
) -> tuple[Change, str]:
    """Stores and lists one archive; returns what became of it, and its hash.

    Raises:
        SetupError: there are others for this GPU, and they are to stay.
    """
    from fleet.files import transfer
    from fleet.files.listed import Listing

    sha256 = await asyncio.to_thread(transfer.sha256_of, path)
    try:
        there = await storage.files.metadata(blob)
    except errors.MissingResourceError:  # in a dry run
        there = None
    is_other = there is not None and there.get(transfer.SHA256) != sha256
    if is_other and not replace:
        raise errors.SetupError(
            f"{blob} in {storage.url} has other kernels for this GPU: --replace puts these in their"
            " place"
        )
    change: Change = "stored" if there is None else "replaced" if is_other else "was there"
    if dry_run:
        return change, sha256
    listing = Listing(storage, FOLDER, settings.keys(), create=True)
    await listing.check()
    if is_other and not await storage.files.delete(blob):
        raise errors.SetupError(f"{blob} cannot be deleted with this token, so not be replaced")
    kind = f"{header.key.gpu}, torch {header.key.torch}"
    await transfer.store(storage, blob, path, kind)
    await listing.add(blob.removeprefix(f"{FOLDER}/"), sha256)
    return change, sha256

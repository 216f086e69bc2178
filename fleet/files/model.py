"""`imagefleet model`: checkpoints in the storage, which workers fetch as store:NAME."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet import console, options
from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings, StorageSettings

if TYPE_CHECKING:
    from fleet.files.preview import Preview
    from fleet.files.transfer import Stored
    from worker.node.reference import Reference

FOLDER = "models"

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE|FOLDER|URL",
        help="A .safetensors file, a folder in diffusers format, or the https:// address of one.",
    ),
]
Sha256 = Annotated[
    str | None,
    typer.Option(
        "--sha256",
        "--model-sha256",
        metavar="HEX",
        help="The SHA-256 that the file must have; required for plain http://.",
    ),
]
Cache = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Where a download is kept until it is stored.")
]
CACHE = Path("~/.cache/imagefleet")
Manifest = Annotated[
    bool,
    typer.Option(
        "--manifest",
        help="List its hash in the folder's manifest.json even if there is none yet; with a signing"
        " key, also sign one that is not signed, with all that it lists.",
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    help="Checkpoints in the storage: a worker fetches one as --model store:NAME.",
)


@app.command("add")
@options.from_settings(SignerSettings)
def add_command(
    settings: SignerSettings,
    source: Source,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name; by default the file's.")
    ] = None,
    sha256: Sha256 = None,
    test: Annotated[
        bool, typer.Option("--test/--no-test", help="Draw images first, if torch is installed.")
    ] = True,
    manifest: Manifest = False,
    cache: Cache = CACHE,
    as_json: options.AsJson = False,
) -> None:
    """Puts a checkpoint into the storage and prints the worker's flags.

    It must be a checkpoint of Stable Diffusion 1.x, 2.x or SDXL. A test image is drawn on this
    machine and written to the current folder, and so are the reference images by which nodes check
    what they draw. An interrupted download or upload goes on where it was. If the storage has a
    models/manifest.json, or there is a signing key, its hash is listed there.

    imagefleet model add dreamshaper-8.safetensors

    imagefleet model add 'https://civitai.com/api/download/models/128713?token=...'
    """
    from worker.files import check, kinds

    async def add() -> tuple[Stored, Preview | None, bool, str | None]:
        from fleet.files import canary, preview, transfer
        from fleet.files.listed import Listing

        keys = settings.keys()
        async with transfer.local_file(source, sha256, kinds.SD1, cache) as path:
            check.check_path(path)
            _check_prediction(path)
            blob = f"{FOLDER}/{_blob_name(name, path)}"
            drawn = expected = expected_at = None
            if test and preview.can_draw():
                console.print_note("drawing a test image; --no-test skips it")
                target = Path(f"{Path(blob).stem}.png")
                drawn = await asyncio.to_thread(preview.draw, path, target)
                console.print_note(_describe(drawn))
                expected = await asyncio.to_thread(_draw_reference, path)
            async with _as_file(path, cache) as file, open_storage(settings) as storage:
                await storage.create()
                listing = Listing(storage, FOLDER, keys, create=manifest)
                await listing.check()
                stored = await transfer.store(storage, blob, file, check.family(path))
                listed = await listing.add(blob.removeprefix(f"{FOLDER}/"), stored.sha256)
                if expected is not None:
                    expected_at = await canary.store(storage.files, blob, expected)
                return stored, drawn, listed, expected_at

    stored, drawn, is_listed, reference = console.run(add())
    flags = _flags(stored)
    if as_json:
        image = None if drawn is None else {**asdict(drawn), "path": str(drawn.path)}
        record = {**asdict(stored), "flags": flags, "image": image, "in_manifest": is_listed}
        console.print_json({**record, "reference": reference})
        return
    console.print_note(
        f"{stored.outcome}:"
        f" {stored.bytes / 1e6:,.0f} MB"
        + (f", {described(settings, FOLDER)}" if is_listed else "")
        + "; a worker uses it with these flags:"
    )
    console.print_plain(flags)


@app.command("list")
@options.from_settings(StorageSettings)
def list_command(settings: StorageSettings, as_json: options.AsJson = False) -> None:
    """Lists the checkpoints in the storage.

    imagefleet model list
    """
    from fleet.files import listing

    if_empty = "no checkpoints in the storage: `imagefleet model add` stores one"
    listing.show(settings, FOLDER, ".safetensors", ".tar", if_empty=if_empty, as_json=as_json)


@app.command("canary")
@console.one_line_errors()
def canary_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|FOLDER", help="A .safetensors file, or a folder in diffusers format."
        ),
    ],
    as_json: options.AsJson = False,
) -> None:
    """Draws a checkpoint's reference images and puts them beside it.

    A node compares what it draws with them, at the start and among the jobs. `model add` does the
    same for a checkpoint in the storage.

    imagefleet model canary dreamshaper-8.safetensors
    """
    from fleet.worker.command import require_libraries

    require_libraries()
    from fleet.files import canary
    from worker.files import check
    from worker.node import reference

    check.check_path(path)
    found = canary.draw(path, console.print_note)
    target = reference.beside(path)
    console.write_file(target, canary.encode(found))
    if as_json:
        facts = found.model_dump(exclude={"images"})
        console.print_json({"path": str(target), **facts})
    else:
        console.print_note(
            f"the reference images of {found.width}x{found.height}; wrong from a distance of"
            f" {found.tolerance:g} on:"
        )
        console.print_plain(str(target))


def _draw_reference(path: Path) -> Reference | None:
    from fleet.files import canary

    try:
        return canary.draw(path, console.print_note)
    except errors.SetupError as error:
        console.print_note(f"stored without reference images: {error}")
        return None


def described(settings: SignerSettings, folder: str) -> str:
    """What `add` says of a file that it has listed."""
    how = "and signed in" if settings.signing_key else "in"
    return f"listed {how} {folder}/manifest.json"


def _blob_name(name: str | None, path: Path) -> str:
    from worker.files import addresses

    suffix = ".tar" if path.is_dir() else ".safetensors"
    own = path.resolve().name if path.is_dir() else path.stem
    blob = (name or own).removesuffix(suffix) + suffix
    if not addresses.FILE_NAME.fullmatch(blob):
        raise errors.SetupError(
            f"the name {(name or own)[:80]!r} is refused: give a --name of letters, digits, spaces"
            " and _ . + - only"
        )
    return blob


def _check_prediction(path: Path) -> None:
    """Raises SetupError if only a .yaml beside the file tells that it predicts v."""
    from worker.files import check, kinds

    if path.is_dir():
        return
    stated = kinds.prediction_type(check.read_header(path))
    if check.prediction_type(path) not in {stated, "epsilon"}:
        raise errors.SetupError(
            f"{str(path)!r} predicts v, as the .yaml beside it says, and a stored file has none"
            " beside it: write it into the file first (see 'v-prediction' in docs/models.md)"
        )


@contextlib.asynccontextmanager
async def _as_file(path: Path, cache: Path) -> AsyncIterator[Path]:
    """*path*, or for a folder a temporary .tar of it."""
    from fleet.files import pack, transfer

    size = sum(each.stat().st_size for each in pack.files_of(path))
    if size == 0:  # a single file
        yield path
        return
    with tempfile.TemporaryDirectory(dir=transfer.room_for(cache, size)) as folder:
        target = Path(folder, "model.tar")
        with transfer.showing("packing") as show:
            await asyncio.to_thread(pack.pack, path, target, lambda packed: show(packed, size))
        yield target


def _describe(drawn: Preview) -> str:
    return (
        f"test image: {drawn.path} ({drawn.width}x{drawn.height}, {drawn.steps} steps on"
        f" {drawn.device}, {drawn.seconds:.0f} s with loading)"
    )


def _flags(stored: Stored) -> str:
    return f"--model store:{stored.blob.removeprefix(f'{FOLDER}/')} --model-sha256 {stored.sha256}"

"""Stores files of one kind: all are checked first, then stored, then listed.

A folder of a checkpoint is packed.
"""

import asyncio
import io
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from cli import console
from cli.options import option
from fleet.files import stored
from fleet.files.stored import Listing, Progress, Ready
from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.files import adapter, contents, kernels, kinds, lora
from imagefleet.files.kinds import MODEL, FileKind
from imagefleet.job.prompt import SAFE_NAME, SAFE_NAMES, is_safe_name
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import SignerSettings
from worker.files import addresses, check

Manifest = Annotated[
    bool,
    typer.Option(
        "--manifest",
        help="List its hash in the folder's manifest.json even if there is none yet; with a"
        " signing key, also sign one that is not signed, with all that it lists.",
    ),
]

#: Marks a folder in diffusers format; one without it is a checkpoint all the same.
_INDEX = "model_index.json"
_LEAST_INDEX = b'{"_class_name": "StableDiffusionPipeline"}'

#: What the worker reads of a folder: no safety checker, no pickles, no pictures.
_PARTS = (
    "unet",
    "transformer",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "scheduler",
)
_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".safetensors"})

UPLOADS = 8

#: The number of an ONNX file's first field, its version.
_ONNX_BEGINS = b"\x08"


@dataclass(frozen=True)
class AddOptions:
    name: str | None = option(
        "Its name for jobs or workers; by default the file's.", metavar="NAME"
    )
    sha256: str | None = option(
        "The SHA-256 that the file must have; required for plain http://.",
        None,
        "--sha256",
        "--model-sha256",
        metavar="HEX",
    )
    cache: Path = option(
        "Where a download is kept until it is stored.",
        Path("~/.cache/imagefleet"),
        metavar="FOLDER",
    )
    replace: bool = option("Replace other kernels for the same GPU.", default=False)
    manifest: Manifest = False


async def add(
    settings: SignerSettings,
    kind: FileKind,
    sources: list[str],
    given: AddOptions,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Stores files, lists their hashes and prints their names; raises SetupError before any."""
    sources = [file for source in sources for file in _expanded(kind, source)]
    if len(sources) > 1 and (given.name or given.sha256):
        raise SetupError("--name and --sha256 are for one file")
    keys = settings.keys()
    async with AsyncExitStack() as stack:
        ready = [await _ready(stack, kind, each, given) for each in sources]
        storage = await stack.enter_async_context(open_storage(settings))
        # Signing what others have listed needs --manifest.
        create = given.manifest or (
            not keys.signing and (kind.needs_list or any(file.alias for file in ready))
        )
        listing = Listing(storage, kind.folder, keys, create=create)
        if not dry_run:
            await storage.create()
            await listing.check({kind.listed_name(file.name) for file in ready})
        with stored.showing("uploading") as show:
            await store(
                listing, kind, ready, show, replace=given.replace, dry_run=dry_run
            )
        rows = []
        notes = []
        lines = []
        listed = f", listed {'and signed ' if keys.signing else ''}in {listing.blob}"
        for file in ready:
            blob = f"{kind.folder}/{file.name}"
            stem = kind.stem(file.name)
            is_refiner = file.content == contents.REFINER.family
            shown = kinds.OTHER_MODEL if is_refiner else kind
            facts = {name: getattr(file, name) for name in stored.REPORTED}
            rows.append({"name": stem, "blob": blob, **facts})
            would = "would be " if dry_run and file.change != "was there" else ""
            notes.append(
                f"{blob}: {would}{file.change}: {file.content}, {file.bytes / 1e6:,.1f} MB,"
                f" SHA-256 {file.sha256}{listed * file.in_manifest}; {shown.use}"
            )
            lines.append(
                shown.handle.format(stem=stem, name=file.name, sha256=file.sha256)
            )
    if (more := len(notes) - console.SCREEN_LINES) > 0:
        notes[console.SCREEN_LINES :] = [f"and {more:,} more"]
    console.show(
        {"files": rows, "dry_run": dry_run}, *lines, notes=notes, as_json=as_json
    )


async def store(
    listing: Listing,
    kind: FileKind,
    ready: Sequence[Ready],
    show: Progress = lambda *_: None,
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> None:
    """Stores files, some at the same time, and lists their hashes; raises a FleetError."""
    # What somebody stored is not signed unseen.
    replace = replace or bool(kind is kinds.TEXT and listing.keys.signing)
    total = sum(file.bytes for file in ready)
    sent = Counter[str]()

    async def put(file: Ready) -> None:
        def on_progress(so_far: int) -> None:
            sent[file.name] = so_far
            show(sent.total(), total)

        await stored.store(
            listing.storage, kind, file, on_progress, replace=replace, dry_run=dry_run
        )

    await concurrency.for_each(ready, put, UPLOADS)
    if not dry_run:
        hashes = {kind.listed_name(file.name): file.sha256 for file in ready}
        aliases, ambiguous = await _aliases(listing, ready)
        is_listed = await listing.change(aliases | hashes, remove=ambiguous)
        for file in ready:
            file.in_manifest = is_listed


async def _aliases(
    listing: Listing, files: Sequence[Ready]
) -> tuple[dict[str, str], set[str]]:
    """The files' aliases to list with their hashes, and those that are of several files.

    As in AUTOMATIC1111 1.10, a file's name goes before an alias, and such of several find none.
    """
    contents = await listing.read() if any(file.alias for file in files) else None
    listed = dict(contents.files) if contents else {}
    found = dict[str, str]()
    ambiguous = set[str]()
    for file in files:
        blob = f"{listing.folder}/{file.alias}{kinds.LORA.suffixes[0]}"
        if not file.alias or await listing.storage.files.metadata(blob) is not None:
            continue
        if listed.setdefault(file.alias, file.sha256) == file.sha256:
            found[file.alias] = file.sha256
        else:
            ambiguous.add(file.alias)
            console.print_note(
                f"the alias {file.alias!r} is of several files: prompts name these"
            )
    return {alias: found[alias] for alias in found.keys() - ambiguous}, ambiguous


def _expanded(kind: FileKind, source: str) -> list[str]:
    """The files in a folder; of a model, which may be a folder itself, *source*."""
    path = Path(source)
    if (
        kind is MODEL
        or not path.is_dir()
        or (kind is kinds.LORA and adapter.folders_of(path))
    ):
        return [source]
    inside = map(str, path.iterdir())
    found = sorted(file for file in inside if file.endswith(kind.suffixes))
    if not found:
        raise SetupError(f"there is no {' or '.join(kind.suffixes)} in {source!r}")
    return found


async def _ready(
    stack: AsyncExitStack,
    kind: FileKind,
    source: str,
    given: AddOptions,
) -> Ready:
    """The checked file, which is there as long as the *stack*; raises SetupError."""
    wanted = kinds.OTHER_MODEL if kind is MODEL else kind
    path = await stack.enter_async_context(
        stored.local_file(source, given.sha256, wanted, given.cache)
    )
    if kind is MODEL:
        return await _model(stack, path, given)
    if kind is kinds.KERNELS:
        header, _ = kernels.read(path)
        return Ready(path, path.resolve().name, header.made_for)
    name = _name(kind, path, given.name)
    if path.is_dir():
        packed = Path(stack.enter_context(TemporaryDirectory()), "adapter.safetensors")
        adapter.pack(path, packed)
        path = packed
    if name.endswith(kinds.ONNX):
        return Ready(path, name, _check_onnx(path, kind))
    content = stored.check_file(path, kind)
    alias = lora.alias_of(check.read_header(path)) if kind is kinds.LORA else ""
    return Ready(path, name, content, alias=alias if alias != kind.stem(name) else "")


def _check_onnx(path: Path, kind: FileKind) -> str:
    """Describes an ONNX file; raises SetupError for one that is none, or too large."""
    stored.check_size(path, kind)
    with path.open("rb") as file:
        if file.read(1) != _ONNX_BEGINS:
            raise SetupError(
                f"{str(path)!r} is no ONNX file: `yolo export format=onnx model=NAME.pt` makes one"
            )
    return "ONNX network"


def _name(kind: FileKind, path: Path, name: str | None) -> str:
    """The name of a file in the storage; raises SetupError unless jobs or workers may name it."""
    suffix = kind.suffixes[kind is MODEL and path.is_dir()]  # a folder is packed
    if kind is kinds.JUDGE and path.suffix == kinds.ONNX:
        suffix = kinds.ONNX
    stem = unicodedata.normalize(
        "NFC", (name or path.resolve().name).removesuffix(suffix)
    )
    if kind in {kinds.LORA, kinds.EMBEDDING}:
        is_safe = is_safe_name(stem)
        advice = SAFE_NAMES
    else:
        pattern, signs = (addresses.STEM, "") if kind is MODEL else (SAFE_NAME, " ( )")
        is_safe = pattern.fullmatch(stem) is not None
        advice = f"give a --name of letters, digits, spaces and _ . + -{signs} only"
    if not is_safe:
        raise SetupError(f"the name {stem[:80]!r} is refused: {advice}")
    return stem + suffix


async def _model(stack: AsyncExitStack, path: Path, given: AddOptions) -> Ready:
    """The checkpoint as one file; raises SetupError if it is unusable."""
    check.check_path(path, kinds.OTHER_MODEL)
    content = check.family(path)
    file = path
    file_name = _name(MODEL, path, given.name)
    if file_name.endswith(".safetensors"):
        stated = contents.prediction_type(check.read_header(path))
        if check.prediction_type(path) not in {stated, "epsilon"}:
            raise SetupError(
                f"{str(path)!r} predicts v, as the .yaml beside it says, and a stored file has none"
                " beside it: write it into the file first (see 'v-prediction' in docs/models.md)"
            )
    if size := sum(part.stat().st_size for part in files_of(path)):
        room = TemporaryDirectory(dir=stored.room_for(given.cache, size))
        file = Path(stack.enter_context(room), "model.tar")
        with stored.showing("packing") as show:
            await asyncio.to_thread(pack, path, file, show)
    return Ready(file, file_name, content)


def files_of(folder: Path) -> list[Path]:
    """The files of a folder to pack, in order; none of a single file."""
    parts = [each for part in _PARTS for each in (folder / part).glob("*")]
    files = [folder / _INDEX, *(each for each in parts if each.suffix in _SUFFIXES)]
    return sorted(each for each in files if each.is_file())


def pack(folder: Path, target: Path, on_progress: Progress) -> None:
    """Writes a .tar, the same for the same folder."""
    packed = 0
    files = files_of(folder)
    total = sum(path.stat().st_size for path in files)
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        if folder / _INDEX not in files:
            entry = tarfile.TarInfo(_INDEX)
            entry.size = len(_LEAST_INDEX)
            tar.addfile(entry, io.BytesIO(_LEAST_INDEX))
        for path in files:
            # Without times and owners, which would make each .tar another.
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            entry.mode = 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
            packed += entry.size
            on_progress(packed, total)

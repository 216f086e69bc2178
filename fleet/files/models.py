"""Makes a checkpoint ready to be stored: checked, tried on this machine, a folder packed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fleet import console
from fleet.files import canary, preview, transfer
from fleet.files.transfer import Ready
from imagefleet import errors
from imagefleet.files import contents
from imagefleet.files.kinds import MODEL
from worker.files import addresses, check
from worker.node import reference

#: Marks a folder in diffusers format; one without it is a checkpoint all the same.
_INDEX = "model_index.json"
_LEAST_INDEX = b'{"_class_name": "StableDiffusionPipeline"}'

#: What the worker reads of a folder: no safety checker, no pickles, no pictures.
_PARTS = (
    *("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"),
)
_SUFFIXES = frozenset({".json", ".txt", ".safetensors"})


@contextlib.asynccontextmanager
async def ready(
    path: Path, name: str | None, cache: Path, *, is_tried: bool
) -> AsyncIterator[Ready]:
    """The checkpoint as one file with its reference images, for the block.

    Raises:
        SetupError: it cannot be loaded or has no valid name.
    """
    check.check_path(path)
    _check_prediction(path)
    file_name = _file_name(name, path)
    facts: dict[str, object] = {"image": None, "reference": None}
    beside: dict[str, bytes] = {}
    if is_tried and preview.can_draw():
        console.print_note("drawing a test image; --no-test skips it")
        target = Path(f"{MODEL.stem(file_name)}.png")
        facts["image"] = await asyncio.to_thread(preview.draw, path, target)
        try:
            found = await asyncio.to_thread(canary.draw, path, console.print_note)
        except errors.SetupError as error:
            console.print_note(f"stored without reference images: {error}")
        else:
            facts["reference"] = reference.stored_name(f"{MODEL.folder}/{file_name}")
            beside[str(facts["reference"])] = canary.encode(found)
    async with _as_file(path, cache) as file:
        yield Ready(file, file_name, check.family(path), facts, beside)


def _file_name(name: str | None, path: Path) -> str:
    suffix = ".tar" if path.is_dir() else ".safetensors"
    own = name or (path.resolve().name if path.is_dir() else path.stem)
    file_name = own.removesuffix(suffix) + suffix
    if not addresses.FILE_NAME.fullmatch(file_name):
        raise errors.SetupError(
            f"the name {own[:80]!r} is refused: give a --name of letters, digits, spaces and"
            " _ . + - only"
        )
    return file_name


def _check_prediction(path: Path) -> None:
    """Raises SetupError if only a .yaml beside the file tells that it predicts v."""
    if path.is_dir():
        return
    stated = contents.prediction_type(check.read_header(path))
    if check.prediction_type(path) not in {stated, "epsilon"}:
        raise errors.SetupError(
            f"{str(path)!r} predicts v, as the .yaml beside it says, and a stored file has none"
            " beside it: write it into the file first (see 'v-prediction' in docs/models.md)"
        )


@contextlib.asynccontextmanager
async def _as_file(path: Path, cache: Path) -> AsyncIterator[Path]:
    """*path*, or for a folder a temporary .tar of it."""
    size = sum(each.stat().st_size for each in files_of(path))
    if size == 0:  # a single file
        yield path
        return
    with tempfile.TemporaryDirectory(dir=transfer.room_for(cache, size)) as folder:
        target = Path(folder, "model.tar")
        with transfer.showing("packing") as show:
            await asyncio.to_thread(pack, path, target, lambda packed: show(packed, size))
        yield target


def files_of(folder: Path) -> list[Path]:
    """The files of a folder to pack, in order; none of a single file."""
    parts = [each for part in _PARTS for each in (folder / part).glob("*")]
    files = [folder / _INDEX, *(each for each in parts if each.suffix in _SUFFIXES)]
    return sorted(each for each in files if each.is_file())


def pack(folder: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Writes a .tar, the same for the same folder; *on_progress* gets the bytes packed so far."""
    packed = 0
    files = files_of(folder)
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        if folder / _INDEX not in files:
            entry = tarfile.TarInfo(_INDEX)
            entry.size = len(_LEAST_INDEX)
            tar.addfile(entry, io.BytesIO(_LEAST_INDEX))
        for path in files:
            # Without times and owners, which would make each .tar another.
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
            packed += entry.size
            on_progress(packed)

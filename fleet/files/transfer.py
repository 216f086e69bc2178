"""Moves one file into the storage: from this machine or a URL, checked, with its progress."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import progress

from fleet import console
from imagefleet import errors
from imagefleet.storage.protocol import BlobRecord, Storage
from worker.files import addresses, check, kinds, model, safetensors
from worker.files.disk_cache import DiskCache

#: Seconds between two lines of progress where there is no terminal.
SECONDS_BETWEEN_LINES = 5.0

CONTENT_TYPE = "application/octet-stream"

#: The blob's metadata, which `list` shows.
SHA256, KIND = "sha256", "kind"

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Stored:
    """What an `add` command did."""

    blob: str
    bytes: int
    sha256: str
    is_new: bool
    """False: the same content was there already."""

    @property
    def outcome(self) -> str:
        """How a note about it begins."""
        return f"{self.blob} {'is stored' if self.is_new else 'was stored before'}"


@contextlib.asynccontextmanager
async def local_file(
    source: str, sha256: str | None, wanted: kinds.Kind, cache: Path
) -> AsyncIterator[Path]:
    """The file or folder *source* on this machine, checked; a URL is downloaded for the block.

    A download that was interrupted goes on the next time. After the block's errors it is kept.

    Raises:
        SetupError: it is not for the *wanted* use, or has another hash.
    """
    if not re.match(r"https?://", source, re.IGNORECASE):
        yield await asyncio.to_thread(_own_file, source, sha256)
        return
    address = addresses.read_address(source, sha256, "")
    assert address is not None  # noqa: S101 - it begins like a URL
    folder = _folder(cache) / address.folder_name(sha256)
    with showing("downloading") as show:
        path = await model.fetch_to(folder, address, sha256, None, wanted=wanted, on_progress=show)
    yield path
    shutil.rmtree(folder, ignore_errors=True)


def check_kind(path: Path, wanted: kinds.Kind) -> safetensors.Header:
    """The header of a file of the *wanted* kind.

    Raises:
        SetupError: it is another, or cannot be read.
    """
    if path.suffix.lower() in addresses.PICKLE_SUFFIXES:
        is_embedding = wanted == kinds.EMBEDDING
        advice = addresses.embedding_pickle_advice if is_embedding else addresses.pickle_advice
        raise errors.SetupError(f"{str(path)!r} is {advice(str(path))}")
    try:
        header = check.read_header(path)
    except OSError as error:
        raise errors.SetupError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if (kind := kinds.find_kind(header)).use != wanted.use:
        raise errors.SetupError(check.refusal(str(path), kind))
    return header


async def store(storage: Storage, blob: str, path: Path, kind: str) -> Stored:
    """Uploads a file; nothing is to be seen of it until it is whole.

    Raises:
        SetupError: the name is taken by another content.
    """
    sha256, size = await asyncio.to_thread(_identify, path)
    metadata = {SHA256: sha256, KIND: kind}
    with showing("uploading") as show:
        is_new = await storage.files.upload(
            blob, path, CONTENT_TYPE, metadata, lambda stored: show(stored, size)
        )
    if not is_new and (found := await _sha256_in(storage, blob)) != sha256:
        raise errors.SetupError(
            f"{blob} in {storage.url} exists and is another file"
            + (f" (SHA-256 {found[:12]}...)" if found else "")
            + ": workers may have it already, so another file needs another --name"
        )
    return Stored(blob, size, sha256, is_new)


async def records(storage: Storage, folder: str, suffixes: tuple[str, ...]) -> list[BlobRecord]:
    """The files of a folder in the storage, by name."""
    found = [each async for each in storage.files.records(f"{folder}/")]
    return sorted(
        (each for each in found if each.name.endswith(suffixes)), key=lambda each: each.name
    )


def room_for(cache: Path, needed_bytes: int) -> Path:
    """A folder for temporary files with that much room.

    Raises:
        NodeError, SetupError: the disk is full, or the folder not writable.
    """
    folder = DiskCache(_folder(cache))
    with folder.errors():
        folder.folder.mkdir(parents=True, exist_ok=True)
        folder.check_room(needed_bytes)
    return folder.folder


@contextlib.contextmanager
def showing(what: str) -> Iterator[Progress]:
    """A bar on a terminal, occasional lines elsewhere."""
    reported_at = time.monotonic()

    def show_line(so_far: int, total: int | None) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= SECONDS_BETWEEN_LINES:
            reported_at = time.monotonic()
            of_total = "" if total is None else f" of {total / 1e6:,.0f}"
            console.print_note(f"{what}: {so_far / 1e6:,.0f}{of_total} MB")

    if not console.stderr.is_terminal:
        yield show_line
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console.stderr) as bar:
        task = bar.add_task(what, total=None)
        yield lambda so_far, total: bar.update(task, completed=so_far, total=total)


def _folder(cache: Path) -> Path:
    return cache.expanduser() / "added"


def _own_file(source: str, sha256: str | None) -> Path:
    path = Path(source).expanduser()
    if sha256 is not None and path.is_file() and _identify(path)[0] != sha256.lower():
        raise errors.SetupError(f"{source!r} has another SHA-256 than {sha256}")
    return path


def _identify(path: Path) -> tuple[str, int]:
    """A file's SHA-256 and size."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return sha256, file.tell()


def sha256_of(path: Path) -> str:
    return _identify(path)[0]


async def _sha256_in(storage: Storage, blob: str) -> str | None:
    async for record in storage.files.records(blob):
        if record.name == blob:
            return record.metadata.get(SHA256)
    return None

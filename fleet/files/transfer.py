"""Moves one file into the storage: from this machine or a URL, checked, with its progress."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import progress

from fleet import console
from fleet.results import files
from imagefleet import errors
from imagefleet.files import kinds
from imagefleet.files.kinds import FileKind
from imagefleet.storage.open import Storage
from worker.files import addresses, check, model
from worker.files.disk_cache import DiskCache

CONTENT_TYPE = "application/octet-stream"

#: The blob's metadata, which `list` shows.
SHA256, CONTENT = "sha256", "content"

#: What is told of a stored file.
REPORTED = ("content", "bytes", "sha256", "change", "in_manifest")

Progress = Callable[[int, int | None], None]


@dataclass(slots=True)
class Ready:
    """A checked file on this machine, ready to be stored under a name; and what was done then."""

    path: Path
    name: str
    content: str
    facts: Mapping[str, object] = field(default_factory=dict)
    """What else is known of it, for JSON."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that belong to it, by their blobs' names."""
    sha256: str = ""
    change: str = ""
    in_manifest: bool = False

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True, slots=True)
class Report:
    """What a command has done: a document for programs, notes and lines for a person."""

    document: Mapping[str, object]
    notes: Sequence[str] = ()
    lines: Sequence[str] = ()

    def show(self, *, as_json: bool) -> None:
        if as_json:
            console.print_json(self.document)
            return
        for note in self.notes:
            console.print_note(note)
        for line in self.lines:
            console.print_plain(line)


@contextlib.asynccontextmanager
async def local_file(
    source: str, sha256: str | None, kind: FileKind, cache: Path
) -> AsyncIterator[Path]:
    """The file or folder *source*, checked; raises SetupError for another *kind* or hash.

    A URL is downloaded for the block, after whose errors it is kept, whole or in part.
    """
    if not re.match(r"https?://", source, re.IGNORECASE):
        yield await asyncio.to_thread(_own_file, source, sha256)
        return
    address = addresses.read_address(source, sha256, "")
    assert address is not None  # noqa: S101 - it begins like a URL
    folder = _folder(cache) / address.folder_name(sha256)
    with showing("downloading") as show:
        path = await model.fetch_to(folder, address, sha256, None, wanted=kind, on_progress=show)
    yield path
    shutil.rmtree(folder, ignore_errors=True)


def _own_file(source: str, sha256: str | None) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        raise errors.SetupError(f"{source!r} does not exist")
    if sha256 and path.is_file() and files.sha256(path) != sha256.lower():
        raise errors.SetupError(f"{source!r} has another SHA-256 than {sha256}")
    return path


def check_file(path: Path, kind: FileKind) -> str:
    """What a file is, as in 'SDXL LoRA'; raises SetupError if it is not of *kind*, or too large."""
    if path.suffix.lower() in addresses.PICKLE_SUFFIXES:
        is_embedding = kind is kinds.EMBEDDING
        advice = addresses.pickle_advice(str(path), is_embedding=is_embedding)
        raise errors.SetupError(f"{str(path)!r} is {advice}")
    try:
        content = kinds.check(kind, str(path), check.read_header(path))
        size = path.stat().st_size
    except OSError as error:
        raise errors.SetupError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if kind.max_bytes is not None and size > kind.max_bytes:
        raise errors.SetupError(
            f"{str(path)!r} has more than {kind.max_bytes / 2**20:,.0f} MiB, the most that workers"
            f" take in {kind.folder}/"
        )
    return content


async def store(
    storage: Storage,
    kind: FileKind,
    ready: Ready,
    on_progress: Callable[[int], None],
    *,
    replace: bool,
    dry_run: bool,
) -> None:
    """Uploads a file, which is seen once it is whole; SetupError if another has its name."""
    blob = f"{kind.folder}/{ready.name}"
    sha256 = ready.sha256 = await asyncio.to_thread(files.sha256, ready.path)
    try:
        there = await storage.files.metadata(blob)
    except errors.MissingResourceError:  # in a dry run
        there = None
    is_other = there is not None and there.get(SHA256) != sha256
    if is_other and not replace and kind is kinds.TEXT:  # the same, as another machine computes it
        is_other, ready.sha256 = False, (there or {}).get(SHA256, sha256)
    if is_other and not replace:
        known = f" (SHA-256 {there[SHA256][:12]}...)" if there and SHA256 in there else ""
        other = (
            "other kernels for this GPU: --replace puts these in their place"
            if kind is kinds.KERNELS
            else f"another file{known}: workers may have it already, so another file needs another"
            " --name"
        )
        raise errors.SetupError(f"{blob} in {storage.url} exists and is {other}")
    ready.change = "stored" if there is None else "replaced" if is_other else "was there"
    if ready.change != "was there" and not dry_run:
        if is_other:
            await delete(storage, blob)
        metadata = {SHA256: sha256, CONTENT: ready.content}
        if not await storage.files.upload(blob, ready.path, CONTENT_TYPE, metadata, on_progress):
            raise errors.TransientError(f"{blob} was stored by another command: try again")


async def overwrite(storage: Storage, blob: str, data: bytes) -> None:
    """Stores a small JSON file in place of what is there; TransientError if others do as well."""
    part = await storage.files.read_part(blob, 0, 1)
    version = None if part is None else part.version
    if not await storage.files.replace(blob, data, "application/json", version):
        raise errors.TransientError(
            f"{blob} is being changed by others: run the same command again in a moment"
        )


async def delete(storage: Storage, blob: str) -> None:
    """Deletes a blob; raises SetupError if the token does not allow it."""
    if not await storage.files.delete(blob):
        raise errors.SetupError(
            f"{blob} cannot be deleted with this token: `imagefleet keys mint files` makes one"
        )


def room_for(cache: Path, needed_bytes: int) -> Path:
    """A folder for temporary files with that much room; raises NodeError or SetupError."""
    folder = DiskCache(_folder(cache))
    with folder.errors():
        folder.folder.mkdir(parents=True, exist_ok=True)
        folder.check_room(needed_bytes)
    return folder.folder


@contextlib.contextmanager
def showing(what: str) -> Iterator[Progress]:
    """A bar of bytes on a terminal."""
    with console.counting(what, None, unit=progress.DownloadColumn()) as move:
        yield lambda so_far, total: move(done=so_far, total=total)


def _folder(cache: Path) -> Path:
    return cache.expanduser() / "added"

"""The blob store in a folder: each blob is a file, its name a path below the folder.

A blob is written and synced under a temporary name, then linked to its own, and last its folder is
synced: it is created atomically, and durable from then on.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from pydantic import BaseModel

from imagefleet.concurrency import Result
from imagefleet.errors import (
    DISK_FULL,
    FleetError,
    MissingResourceError,
    SetupError,
    StorageFullError,
    TransientError,
)
from imagefleet.storage import protocol
from imagefleet.storage.protocol import (
    BlobPart,
    BlobRecord,
    BlobStore,
    Clock,
    Metadata,
    OnDoubt,
    OnProgress,
    Operations,
)

METADATA_FOLDER = ".metadata"
TEMPORARY_FOLDER = ".temporary"

_IN_THE_WAY = (FileExistsError, IsADirectoryError, NotADirectoryError)
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP}

#: Copied between two reports of an upload's progress.
_COPIED_BYTES = 8 * 2**20

#: The year 3000.
_LATEST = 32_503_680_000

#: Names listed per call in a thread.
_NAMES_PAGE = 1_000

#: Files of uploads that broke off are removed after this time; no upload takes as long.
_ABANDONED_SECONDS = 86_400.0

_NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class _Details(BaseModel):
    """The sidecar of a blob."""

    content_type: str = ""
    metadata: dict[str, str]


class LocalBlobs(BlobStore):
    """A folder of files, each written once and atomically."""

    def __init__(self, folder: Path, operations: Operations) -> None:
        self.folder = folder
        self.name = folder.name
        self.clock = Clock()
        self._address = folder.absolute().as_uri()
        self._operations = operations

    async def create_container(self) -> None:
        def create() -> None:
            for name in (METADATA_FOLDER, TEMPORARY_FOLDER):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            for leftover in (self.folder / TEMPORARY_FOLDER).iterdir():
                with contextlib.suppress(OSError):
                    # Whichever way the clock was set since.
                    if abs(time.time() - leftover.stat().st_mtime) > _ABANDONED_SECONDS:
                        leftover.unlink()

        await self._in_thread(create)

    async def check(self) -> None:
        if not self.may_be_missing:
            self._must_exist()

    async def create(
        self,
        name: str,
        data: bytes,
        content_type: str,
        metadata: Metadata,
        on_doubt: OnDoubt = lambda: None,  # noqa: ARG002 - a disk leaves none
    ) -> bool:
        return await self._create(
            name, lambda file: file.write(data), content_type, metadata
        )

    async def upload(
        self,
        name: str,
        file: Path,
        content_type: str,
        metadata: Metadata,
        on_progress: OnProgress = lambda _: None,
    ) -> bool:
        return await self._create(
            name, partial(_copy, file, on_progress), content_type, metadata
        )

    async def replace(
        self, name: str, data: bytes, content_type: str, version: str | None
    ) -> bool:
        if version is None:
            return await self.create(name, data, content_type, {})
        path = self._path(name)
        temporary = self.folder / TEMPORARY_FOLDER / uuid.uuid4().hex

        def replace() -> bool:
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    _make_durable(file)
                if not path.is_file() or _version(path.stat()) != version:
                    return False
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            sync(path.parent)
            return True

        return await self._writing(replace)

    async def append(self, name: str, data: bytes, position: int) -> bool:
        path = self._path(name)

        def append() -> bool:
            if position == 0:
                self._must_exist()
                _make_durable_folder(path.parent, self.folder)
            elif not path.is_file():
                return False
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # others may append at the same time
                if file.seek(0, os.SEEK_END) != position:
                    return False
                try:
                    file.write(data)
                    _make_durable(file)
                except OSError:
                    file.truncate(position)
                    raise
            if position == 0:
                sync(path.parent)
            return True

        return await self._writing(append)

    async def exists(self, name: str) -> bool:
        return await self._writing(self._path(name).is_file)

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        path = self._path(name)

        def read() -> bytes:
            with path.open("rb") as file:
                protocol.check_blob_size(
                    name, os.fstat(file.fileno()).st_size, max_bytes
                )
                return file.read()

        return await self._reading(read)

    async def record(self, name: str) -> BlobRecord | None:
        path = self._path(name)
        return await self._reading(
            lambda: self._record(name) if path.is_file() else None
        )

    async def delete(self, name: str) -> bool:
        path = self._path(name)

        def delete() -> None:
            path.unlink(missing_ok=True)
            self._sidecar(name).unlink(missing_ok=True)

        await self._in_thread(delete)
        return True

    async def read_part(
        self, name: str, offset: int, max_bytes: int
    ) -> BlobPart | None:
        path = self._path(name)

        def read() -> BlobPart:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(offset)
                return BlobPart(file.read(max_bytes), status.st_size, _version(status))

        return await self._reading(read)

    def address(self, name: str) -> str:
        return f"{self._address}/{quote(name)}"

    async def names(self, prefix: str = "") -> AsyncIterator[str]:
        async for page in self._pages(prefix):
            for name in page:
                yield name

    async def records(self, prefix: str = "") -> AsyncIterator[BlobRecord]:
        async for page in self._pages(prefix):
            read = partial(list[BlobRecord], map(self._record, page))
            for record in await self._in_thread(read):
                yield record

    async def folders(self, prefix: str) -> AsyncIterator[str]:
        def folders() -> list[str]:
            with (
                contextlib.suppress(*_NOT_THERE),
                os.scandir(self.folder / prefix) as entries,
            ):
                return sorted(
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                    and not entry.name.startswith(".")
                )
            return []

        for name in await self._writing(folders):
            yield name

    def _must_exist(self) -> None:
        if not self.folder.is_dir():
            raise _no_folder(self.folder)

    def _path(self, name: str) -> Path:
        protocol.check_blob_name(name)
        return self.folder / name

    def _sidecar(self, name: str) -> Path:
        return self.folder / METADATA_FOLDER / f"{name}.json"

    async def _create(
        self,
        name: str,
        write: Callable[[BinaryIO], object],
        content_type: str,
        metadata: Metadata,
    ) -> bool:
        protocol.check_blob_name(name)
        protocol.check_metadata(metadata)
        details = _Details(content_type=content_type, metadata=dict(metadata))
        path = self.folder / name
        own = self._sidecar(name)
        draft = self.folder / TEMPORARY_FOLDER / uuid.uuid4().hex
        sidecar = draft.with_suffix(".json")

        def create() -> bool:
            is_new = False
            try:
                if not path.is_file():
                    self._must_exist()
                    draft.parent.mkdir(exist_ok=True)
                    # Not synced: no job depends on it.
                    sidecar.write_text(details.model_dump_json(), encoding="utf-8")
                    with draft.open("xb") as file:
                        write(file)
                        _make_durable(file)
                    with self._alone():
                        if is_new := not path.is_file():
                            # None is without its sidecar.
                            for each in (own, path):
                                _make_durable_folder(each.parent, self.folder)
                            sidecar.replace(own)
                            is_new = _link(draft, path)
            finally:
                draft.unlink(missing_ok=True)
                sidecar.unlink(missing_ok=True)
            # Also of one that somebody else has created: the message is deleted next, which reaches
            # the disk with a later send or checkpoint, and a power failure must not lose both.
            sync(path.parent)
            return is_new

        return await self._writing(create)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps others out, in whatever process, lest a sidecar be another's than its file."""
        (self.folder / METADATA_FOLDER).mkdir(exist_ok=True)
        folder = os.open(self.folder / METADATA_FOLDER, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _record(self, name: str) -> BlobRecord:
        status = (self.folder / name).stat()
        # A file's time may be anything; a datetime ends with the year 9999.
        created_at = datetime.fromtimestamp(min(max(status.st_mtime, 0), _LATEST), UTC)
        return BlobRecord(name, status.st_size, created_at, self._metadata(name))

    def _metadata(self, name: str) -> dict[str, str]:
        try:
            return _Details.model_validate_json(
                self._sidecar(name).read_bytes()
            ).metadata
        except (FileNotFoundError, ValueError):
            # A file that was copied here, or whose metadata a power failure erased.
            return {}

    async def _pages(self, prefix: str) -> AsyncIterator[list[str]]:
        self._operations.blob_writes += 1
        # From the prefix's own folder: beside it may be ten thousand campaigns.
        folder, slash, _ = prefix.rpartition("/")
        names = self._walk(folder + slash, prefix)
        try:
            while page := await self._in_thread(
                lambda: list(islice(names, _NAMES_PAGE))
            ):
                yield page
        finally:
            # If the caller was cancelled while a thread lists them, the thread closes them.
            with contextlib.suppress(ValueError):
                names.close()

    def _walk(self, folder: str, prefix: str) -> Generator[str]:
        """The names below *folder* ("" or ending in a slash) that start with *prefix*."""
        try:
            entries = os.scandir(self.folder / folder)
        except _NOT_THERE:
            if not folder or not self.folder.is_dir():
                raise
            return
        with entries:
            for entry in entries:
                name = folder + entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below = f"{name}/"
                    if below.startswith(prefix) or prefix.startswith(below):
                        yield from self._walk(below, prefix)
                elif name.startswith(prefix):
                    yield name

    async def _writing(self, work: Callable[[], Result]) -> Result:
        self._operations.blob_writes += 1
        return await self._in_thread(work)

    async def _reading(self, work: Callable[[], Result]) -> Result | None:
        """None where the file is not there."""
        self._operations.blob_reads += 1

        def read() -> Result | None:
            try:
                return work()
            except _NOT_THERE:
                return None

        return await self._in_thread(read)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise _translated(error, self.folder) from error


def _link(draft: Path, path: Path) -> bool:
    """Gives a finished file its name; False if it is taken."""
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        if not path.is_file():
            raise
        return False
    return True


def _translated(error: OSError, folder: Path) -> FleetError:
    """Translates the system's error into one that names *folder* and what to do."""
    if error.errno in DISK_FULL:
        return StorageFullError(
            f"the disk is full: cannot write to {folder}; free space"
        )
    if error.errno in _REFUSED:
        return SetupError(f"no access to {folder}: {error.strerror}")
    if isinstance(error, _IN_THE_WAY):
        return SetupError(
            f"{error.filename2 or error.filename} is in the way: a file where there should be"
            " a folder, or the reverse; move it away"
        )
    if not folder.is_dir():
        return _no_folder(folder)
    return TransientError(f"{folder}: {error.strerror or error}")


def _no_folder(folder: Path) -> MissingResourceError:
    return MissingResourceError(
        f"there is no folder {folder}; `imagefleet load` creates it"
    )


def _make_durable_folder(folder: Path, root: Path) -> None:
    """Makes a folder, synced to the disk; *root*, which somebody may have deleted, is not made."""
    if folder != root and not folder.exists():
        _make_durable_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path | str) -> None:
    """Returns once the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}"


def _copy(source: Path, on_progress: OnProgress, file: BinaryIO) -> None:
    copied = 0
    with source.open("rb") as original:
        while data := original.read(_COPIED_BYTES):
            file.write(data)
            copied += len(data)
            on_progress(copied)


def _make_durable(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())

"""The blob store in a folder: each blob is a file, its name a path below the folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import quote

from imagefleet.concurrency import Batches
from imagefleet.storage import protocol
from imagefleet.storage.local.new_blobs import (
    METADATA_FOLDER,
    TEMPORARY_FOLDER,
    NewBlob,
    NewBlobs,
    make_durable_folder,
    no_folder,
    sync_folder,
    translated,
)

#: Copied between two reports of an upload's progress.
_COPIED_BYTES = 8 * 2**20

#: The year 3000.
_LATEST = 32_503_680_000

#: Names listed per call in a thread.
_NAMES_PAGE = 1_000

#: Files of uploads that broke off are removed after this time; no upload takes as long.
_ABANDONED_SECONDS = 86_400.0

_NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

#: Threads that create blobs, each several at once: few, as threads keep each other from Python, but
#: enough to share a slow disk's syncs.
_CREATORS = 3
_MOST_AT_ONCE = 16

_Result = TypeVar("_Result")


class LocalBlobs:
    """A folder of files, each written once and atomically."""

    def __init__(self, folder: Path, operations: protocol.Operations) -> None:
        self.folder = folder
        self._address = folder.absolute().as_uri()
        self._operations = operations
        self._new = NewBlobs(folder)
        threads = ThreadPoolExecutor(_CREATORS, thread_name_prefix="new-blobs")
        self._creations: Batches[NewBlob, bool] = Batches(
            self._new.create, threads, most=_MOST_AT_ONCE, at_once=_CREATORS
        )

    @property
    def name(self) -> str:
        return self.folder.name

    async def create_folder(self) -> None:
        await self._in_thread(self._create_folder)

    async def check(self) -> None:
        """Raises SetupError if there is no such folder."""
        if not self.folder.is_dir():
            raise no_folder(self.folder)

    async def create(
        self,
        name: str,
        data: bytes,
        content_type: str,
        metadata: Mapping[str, str],
        on_doubt: Callable[[], None] = lambda: None,  # noqa: ARG002 - a disk leaves none
    ) -> bool:
        protocol.check_blob_name(name)
        protocol.check_metadata(metadata)
        details = json.dumps({"content_type": content_type, "metadata": dict(metadata)})
        self._operations.blob_writes += 1
        return await self._creations(NewBlob(name, data, details.encode()))

    async def upload(
        self,
        name: str,
        file: Path,
        content_type: str,
        metadata: Mapping[str, str],
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> bool:
        protocol.check_blob_name(name)
        protocol.check_metadata(metadata)
        details = json.dumps({"content_type": content_type, "metadata": dict(metadata)})
        self._operations.blob_writes += 1
        new = NewBlob(name, partial(_copy, file, on_progress), details.encode())
        (outcome,) = await asyncio.to_thread(self._new.create, [new])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def replace(self, name: str, data: bytes, content_type: str, version: str | None) -> bool:
        protocol.check_blob_name(name)
        if version is None:
            return await self.create(name, data, content_type, {})
        self._operations.blob_writes += 1
        return await self._in_thread(self._replace, name, data, version)

    async def append(self, name: str, data: bytes, position: int) -> bool:
        protocol.check_blob_name(name)
        self._operations.blob_writes += 1
        return await self._in_thread(self._append, name, data, position)

    async def exists(self, name: str) -> bool:
        protocol.check_blob_name(name)
        self._operations.blob_writes += 1
        return await self._in_thread((self.folder / name).is_file)

    async def read(self, name: str, max_bytes: int | None = None) -> bytes | None:
        protocol.check_blob_name(name)
        self._operations.blob_reads += 1
        return await self._in_thread(self._read, name, max_bytes)

    async def record(self, name: str) -> protocol.BlobRecord | None:
        protocol.check_blob_name(name)
        self._operations.blob_reads += 1

        def read() -> protocol.BlobRecord | None:
            try:
                return self._record(name) if (self.folder / name).is_file() else None
            except _NOT_THERE:  # deleted in between
                return None

        return await self._in_thread(read)

    async def metadata(self, name: str) -> Mapping[str, str] | None:
        found = await self.record(name)
        return None if found is None else found.metadata

    async def delete(self, name: str) -> bool:
        protocol.check_blob_name(name)
        await self._in_thread(self._delete, name)
        return True

    async def read_part(self, name: str, offset: int, max_bytes: int) -> protocol.BlobPart | None:
        protocol.check_blob_name(name)
        self._operations.blob_reads += 1
        return await self._in_thread(self._read_part, name, offset, max_bytes)

    def address(self, name: str) -> str:
        return f"{self._address}/{quote(name)}"

    async def names(self, prefix: str = "") -> AsyncIterator[str]:
        self._operations.blob_writes += 1
        with _closing(self._walk("", prefix)) as names:
            while page := await self._in_thread(lambda: list(islice(names, _NAMES_PAGE))):
                for name in page:
                    yield name

    async def records(self, prefix: str = "") -> AsyncIterator[protocol.BlobRecord]:
        self._operations.blob_writes += 1
        with _closing(self._walk("", prefix)) as names:
            while page := await self._in_thread(lambda: list(islice(names, _NAMES_PAGE))):
                for record in await self._in_thread(lambda: [self._record(name) for name in page]):
                    yield record

    async def folders(self, prefix: str) -> AsyncIterator[str]:
        self._operations.blob_writes += 1
        for name in await self._in_thread(self._folders, prefix):
            yield name

    def _create_folder(self) -> None:
        for name in (METADATA_FOLDER, TEMPORARY_FOLDER):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for leftover in (self.folder / TEMPORARY_FOLDER).iterdir():
            with contextlib.suppress(OSError):
                # Whichever way the clock was set since.
                if abs(time.time() - leftover.stat().st_mtime) > _ABANDONED_SECONDS:
                    leftover.unlink()

    def _replace(self, name: str, data: bytes, version: str) -> bool:
        path = self.folder / name
        temporary = self.folder / TEMPORARY_FOLDER / uuid.uuid4().hex
        try:
            _write_durably(temporary, data)
            if not path.is_file() or _version(path.stat()) != version:
                return False
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
        return True

    def _append(self, name: str, data: bytes, position: int) -> bool:
        path = self.folder / name
        if position == 0:
            if not self.folder.is_dir():
                raise no_folder(self.folder)
            make_durable_folder(path.parent, self.folder)
        elif not path.is_file():
            return False
        with path.open("ab") as file:
            if file.tell() != position:
                return False
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(position)
                raise
        if position == 0:
            sync_folder(path.parent)
        return True

    def _folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self.folder / prefix) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                )
        except _NOT_THERE:
            return []

    def _read(self, name: str, max_bytes: int | None) -> bytes | None:
        try:
            with (self.folder / name).open("rb") as file:
                protocol.check_blob_size(name, os.fstat(file.fileno()).st_size, max_bytes)
                return file.read()
        except _NOT_THERE:
            return None

    def _read_part(self, name: str, offset: int, max_bytes: int) -> protocol.BlobPart | None:
        try:
            with (self.folder / name).open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(offset)
                return protocol.BlobPart(file.read(max_bytes), status.st_size, _version(status))
        except _NOT_THERE:
            return None

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / METADATA_FOLDER / f"{name}.json").unlink(missing_ok=True)

    def _record(self, name: str) -> protocol.BlobRecord:
        status = (self.folder / name).stat()
        # A file's time may be anything; a datetime ends with the year 9999.
        created_at = datetime.fromtimestamp(min(max(status.st_mtime, 0), _LATEST), UTC)
        return protocol.BlobRecord(name, status.st_size, created_at, self._metadata(name))

    def _metadata(self, name: str) -> dict[str, str]:
        try:
            sidecar = self.folder / METADATA_FOLDER / f"{name}.json"
            metadata = json.loads(sidecar.read_bytes())["metadata"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            # A file that was copied here, or whose metadata a power failure erased.
            return {}
        is_whole = isinstance(metadata, dict) and all(
            isinstance(each, str) for each in metadata.values()
        )
        return metadata if is_whole else {}

    def _walk(self, folder: str, prefix: str) -> Generator[str]:
        """The names below *folder* ("" or ending in a slash) that start with *prefix*."""
        with os.scandir(self.folder / folder) as entries:
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

    async def _in_thread(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        try:
            return await asyncio.to_thread(work, *arguments)
        except OSError as error:
            raise translated(error, self.folder) from error


@contextlib.contextmanager
def _closing(names: Generator[str]) -> Generator[Generator[str]]:
    """Closes *names* at the end, also where the caller was cancelled while a thread lists them."""
    try:
        yield names
    finally:
        with contextlib.suppress(ValueError):  # the thread goes on, and closes them
            names.close()


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}"


def _copy(source: Path, on_progress: Callable[[int], None], file: BinaryIO) -> None:
    copied = 0
    with source.open("rb") as original:
        while data := original.read(_COPIED_BYTES):
            file.write(data)
            copied += len(data)
            on_progress(copied)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

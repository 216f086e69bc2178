"""Files that prompts name, from a folder, or from the storage through the disk cache."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Self

from imagefleet import errors
from imagefleet.files import safetensors
from imagefleet.files.kinds import FileKind
from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from worker.files import manifest
from worker.files.disk_cache import SUFFIX, DiskCache
from worker.files.manifest import Manifest

log = logging.getLogger(__name__)

#: Files that are not checked again while they stay as they are. A campaign may use a million: the
#: text states of its prompts.
REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of such files on this machine, and its manifest."""

    path: Path
    manifest: Manifest
    must_exist: bool = True


def check_content(what: str, file: BufferedReader | BytesIO, size: int, sha256: str | None) -> None:
    """Checks that a file is complete and matches the manifest; *what* it is, for messages.

    Raises:
        TransientError: it is truncated, or has another hash.
        UnusableFileError: it is not a safetensors file.
    """
    expected = _expected_bytes(what, file)
    if expected is None or size < expected:
        raise errors.TransientError(
            f"{what} is truncated: it has {size:,} bytes"
            + (f" of {expected:,}" if expected else "")
        )
    if sha256 is None:
        return
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        raise errors.TransientError(f"the SHA-256 of {what} is not the one in its manifest.json")


def _expected_bytes(what: str, file: BufferedReader | BytesIO) -> int | None:
    """The file's size according to its header, or None if not even the header is complete."""
    try:
        return safetensors.read_header(file).file_bytes
    except safetensors.TruncatedError:
        return None
    except safetensors.MalformedError as error:
        raise errors.UnusableFileError(f"{what} is not a safetensors file") from error


class FileLibrary:
    """Resolves names to files. A name is one safe path segment, checked with the prompt."""

    def __init__(
        self,
        blobs: protocol.BlobStore,
        kind: FileKind,
        stored: Manifest,
        *,
        folders: Sequence[Folder],
        cache: Path,
        cache_bytes: int,
    ) -> None:
        """*folders* come before the storage, which has the manifest *stored*."""
        self.lookups: Counter[str] = Counter()
        self._blobs = blobs
        self._kind = kind
        self._folders = folders
        self._cache = DiskCache(cache, cache_bytes)
        self._fetches: dict[str, asyncio.Task[Path]] = {}
        self._room = asyncio.Semaphore(kind.fetched_at_once)
        self._storage_manifest = stored
        # What was checked in full, and against which hash: by path, modification time and size.
        self._checked: OrderedDict[Path, tuple[int, int, str | None]] = OrderedDict()

    @classmethod
    def stored(
        cls,
        blobs: protocol.BlobStore,
        kind: FileKind,
        *,
        cache: Path,
        cache_bytes: int,
        directory: Path | None = None,
        trusted: TrustedKeys | None = None,
    ) -> Self:
        """The files of *directory*, then the storage's, which a *trusted* key must list."""
        listed = Manifest.stored(blobs, kind.folder, trusted)
        folders = [own_folder(kind, directory)] if directory else []
        return cls(blobs, kind, listed, folders=folders, cache=cache, cache_bytes=cache_bytes)

    async def resolve(self, name: str) -> Path:
        """The file of that name, complete and matching its manifest.

        Raises:
            MissingFileError: it does not exist, or a signed manifest does not list it.
            UnusableFileError: it is too large, or not a safetensors file.
            TransientError: the storage did not answer, or the file is truncated or does not match.
            NodeError, SetupError: the cache cannot be written.
            SetupError: the manifest is too large, or not signed with the trusted key.
        """
        path = await self._in_folders(name) or await self._in_cache(name)
        self.lookups["hit" if path else "miss"] += 1
        if path is not None:
            return path
        fetch = self._fetches.get(name)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(name), name=f"fetch {self._kind.noun} {name}")
            self._fetches[name] = fetch
            fetch.add_done_callback(self._fetched)
        # Shielded: several jobs wait for one fetch, and one of them may be cancelled.
        return await asyncio.shield(fetch)

    async def _in_folders(self, name: str) -> Path | None:
        for folder in self._folders:
            path = folder.path / f"{name}{SUFFIX}"
            try:
                if not path.is_file():
                    continue
            except OSError as error:
                raise unreadable(self._kind, folder.path, error.strerror) from error
            await self._verify(folder.manifest, name, partial(self._check, name, path))
            return path
        return None

    async def _in_cache(self, name: str) -> Path | None:
        path = self._cache.find(name)
        if path is None:
            return None
        try:
            await self._verify(self._storage_manifest, name, partial(self._check, name, path))
        except (errors.TransientError, errors.UnusableFileError) as error:
            log.warning(
                "fetching %s again: %s",
                path,
                error,
                extra={"action": f"{self._kind.name}_dropped", self._kind.name: name},
            )
            self._cache.drop(path)
            return None
        return path

    def _fetched(self, fetch: asyncio.Task[Path]) -> None:
        self._fetches = {name: task for name, task in self._fetches.items() if task is not fetch}
        if not fetch.cancelled():
            fetch.exception()  # retrieved, even if every job that waited for it was cancelled

    async def _fetch(self, name: str) -> Path:
        await self._storage_manifest.sha256(name)  # a broken one costs no download
        async with self._room, self._cache.fetching(name):
            # Another worker of this machine may have fetched it meanwhile.
            return await self._in_cache(name) or await self._download(name)

    async def _download(self, name: str) -> Path:
        kind = self._kind
        data = await self._blobs.read(f"{kind.folder}/{name}{SUFFIX}", max_bytes=kind.max_bytes)
        if data is None:
            await self._blobs.check()  # without its container, the job is not at fault
            for folder in self._folders:
                if folder.must_exist and not folder.path.is_dir():
                    # Unmounted, say: the jobs are not at fault.
                    raise unreadable(kind, folder.path, "it does not exist")
            places = "".join(f"{folder.path} or " for folder in self._folders)
            raise errors.MissingFileError(
                f"no {kind.noun} {name}{SUFFIX} in {places}{kind.folder}/ of the container"
                f" {self._blobs.name!r}"
            )
        check = partial(check_content, self._what(name), BytesIO(data), len(data))
        await self._verify(self._storage_manifest, name, check)
        return await asyncio.to_thread(self._cache.store, name, data)

    def _what(self, name: str) -> str:
        return f"the {self._kind.noun} {name}{SUFFIX}"

    async def _verify(
        self, listed: Manifest, name: str, check: Callable[[str | None], None]
    ) -> None:
        sha256 = await listed.sha256(name)
        try:
            await asyncio.to_thread(check, sha256)
        except errors.TransientError:
            listed.forget()  # one of the two may be old
            raise

    def _check(self, name: str, path: Path, sha256: str | None) -> None:
        try:
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_size, sha256)
            if self._checked.get(path) == seen:
                return
            protocol.check_blob_size(path.name, status.st_size, self._kind.max_bytes)
            with path.open("rb") as file:
                check_content(self._what(name), file, status.st_size, sha256)
        except OSError as error:
            raise errors.TransientError(
                f"the {self._kind.noun} {path.name} cannot be read: {error.strerror or error}"
            ) from error
        self._checked[path] = seen
        if len(self._checked) > REMEMBERED:
            self._checked.popitem(last=False)


def own_folder(kind: FileKind, path: Path) -> Folder:
    """The folder of a worker's setting, whose manifest need not be signed."""

    def read() -> bytes | None:
        try:
            with (path / manifest.NAME).open("rb") as file:
                return file.read(manifest.MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(kind, path, error.strerror) from error

    return Folder(path, Manifest(f"{path}/{manifest.NAME}", lambda: asyncio.to_thread(read)))


def unreadable(kind: FileKind, path: Path, reason: str | None) -> errors.SetupError:
    return errors.SetupError(f"{kind.flag} {path} cannot be read: {reason}")

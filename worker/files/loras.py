"""LoRA files from a folder, or from `loras/` in the storage through the disk cache; manifests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Self

from imagefleet import errors
from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from worker.files import manifest, safetensors
from worker.files.disk_cache import SUFFIX, DiskCache

log = logging.getLogger(__name__)

#: The largest LoRA file: it is checked in memory before it is stored, and eight may arrive at once.
MAX_BYTES = 2**30

#: A manifest is read again after this time; a replaced file is fetched again by then.
MANIFEST_SECONDS = 300.0


class Manifest:
    """The manifest of a folder, read again from time to time; there need not be one.

    With *trusted* keys it must be signed by one of them, and what it does not list is refused.
    """

    def __init__(
        self,
        where: str,
        read: Callable[[], Awaitable[bytes | None]],
        *,
        folder: str = "",
        trusted: TrustedKeys | None = None,
    ) -> None:
        self._where = where
        self._read = read
        self._folder = folder
        self._trusted = trusted
        self._hashes: Mapping[str, str] = {}
        self._read_at: float | None = None

    @classmethod
    def stored(cls, blobs: protocol.BlobStore, folder: str, trusted: TrustedKeys | None) -> Self:
        """That of a folder in the container of files."""
        name = f"{folder}/{manifest.NAME}"
        return cls(
            f"{name} in the container {blobs.name!r}",
            lambda: blobs.read(name, manifest.MAX_BYTES),
            folder=folder,
            trusted=trusted,
        )

    async def sha256(self, name: str) -> str | None:
        """The hash that the file must have, or None where any will do.

        Raises:
            TransientError: the manifest cannot be read, or is damaged; SetupError: it is too
            large. With trusted keys also MissingFileError: it does not list the file; SetupError:
            it is missing, damaged or not signed.
        """
        now = time.monotonic()
        if self._read_at is None or now - self._read_at > MANIFEST_SECONDS:
            await self._load()
        if self._trusted is None or name in self._hashes:
            return self._hashes.get(name)
        if self._read_at is None or self._read_at < now:
            await self._load()  # the file may be new
        if name not in self._hashes:
            raise errors.MissingFileError(
                f"{self._where}, which is signed, does not list {name!r}:"
                f" `{manifest.ADD_COMMANDS[self._folder]}` with IMAGEFLEET_SIGNING_KEY lists it"
            )
        return self._hashes[name]

    def forget(self) -> None:
        """Reads it again the next time: it and a file disagree, and one of them is old."""
        self._read_at = None

    async def _load(self) -> None:
        began_at = time.monotonic()
        try:
            content = await self._read()
        except errors.UnusableFileError:
            raise manifest.too_large(self._where) from None
        # It may be half-written; going on without it would mean to trust any file. In a thread:
        # a large one takes half a second.
        self._hashes = await asyncio.to_thread(self._checked, content)
        self._read_at = began_at

    def _checked(self, content: bytes | None) -> Mapping[str, str]:
        if self._trusted is None:
            return {} if content is None else manifest.parse(self._where, content).files
        if content is None:
            raise self._untrusted("there is none")
        try:
            contents = manifest.parse(self._where, content)
        except errors.TransientError as error:
            raise self._untrusted(error.message) from None
        if not contents.is_signed_by(self._trusted, self._folder):
            raise self._untrusted("another key signed it" if contents.is_signed else "it is plain")
        return contents.files

    def _untrusted(self, why: str) -> errors.SetupError:
        # Not the job's fault: a damaged manifest would send every job with a LoRA to the poison
        # queue.
        return errors.SetupError(
            f"{self._where} must be signed with the trusted key, but {why}:"
            f" `{manifest.ADD_COMMANDS[self._folder]}` with IMAGEFLEET_SIGNING_KEY signs it"
        )


def check_content(name: str, file: BufferedReader | BytesIO, size: int, sha256: str | None) -> None:
    """Checks that a LoRA is complete and matches the manifest.

    Raises:
        TransientError: it is truncated, or has another hash.
        UnusableFileError: it is not a safetensors file.
    """
    expected = _expected_bytes(name, file)
    if expected is None or size < expected:
        raise errors.TransientError(
            f"the LoRA {name}.safetensors is truncated: it has {size:,} bytes"
            + (f" of {expected:,}" if expected else "")
        )
    if sha256 is None:
        return
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        raise errors.TransientError(
            f"the SHA-256 of the LoRA {name}.safetensors is not the one in its manifest.json"
        )


def _expected_bytes(name: str, file: BufferedReader | BytesIO) -> int | None:
    """The file's size according to its header, or None if not even the header is complete."""
    try:
        return safetensors.read_header(file).file_bytes
    except safetensors.TruncatedError:
        return None
    except safetensors.MalformedError as error:
        raise errors.UnusableFileError(
            f"the LoRA {name}.safetensors is not a safetensors file"
        ) from error


class LoraLibrary:
    """Resolves LoRA names to files. A name is one safe path segment, checked with the prompt."""

    def __init__(
        self,
        blobs: protocol.BlobStore,
        *,
        directory: Path | None,
        cache: Path,
        cache_bytes: int,
        trusted: TrustedKeys | None = None,
    ) -> None:
        """*directory* comes before the storage, whose files one of the *trusted* keys must list."""
        self.lookups: Counter[str] = Counter()
        self._blobs = blobs
        self._directory = directory
        self._cache = DiskCache(cache, cache_bytes)
        self._fetches: dict[str, asyncio.Task[Path]] = {}
        self._storage_manifest = Manifest.stored(blobs, manifest.LORAS, trusted)
        self._directory_manifest = Manifest(
            f"{directory}/{manifest.NAME}", lambda: asyncio.to_thread(_read, directory)
        )
        # What was checked in full, and against which hash: by path, modification time and size.
        self._checked: dict[Path, tuple[int, int, str | None]] = {}

    async def resolve(self, name: str) -> Path:
        """The file of the LoRA *name*, complete and matching its manifest.

        Raises:
            MissingFileError: it does not exist, or a signed manifest does not list it.
            UnusableFileError: it is too large, or not a safetensors file.
            TransientError: the storage did not answer, or the file is truncated or does not match.
            NodeError, SetupError: the cache cannot be written.
            SetupError: the manifest is too large, or not signed with the trusted key.
        """
        path = await self._in_directory(name) or await self._in_cache(name)
        self.lookups["hit" if path else "miss"] += 1
        if path is not None:
            return path
        fetch = self._fetches.get(name)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(name), name=f"fetch LoRA {name}")
            self._fetches[name] = fetch
            fetch.add_done_callback(self._fetched)
        # Shielded: several jobs wait for one fetch, and one of them may be cancelled.
        return await asyncio.shield(fetch)

    async def _in_directory(self, name: str) -> Path | None:
        path = self._directory and self._directory / f"{name}{SUFFIX}"
        if path is None:
            return None
        try:
            if not path.is_file():
                return None
        except OSError as error:
            raise _unreadable(path.parent, error.strerror) from error
        await self._verify(self._directory_manifest, name, partial(self._check, name, path))
        return path

    async def _in_cache(self, name: str) -> Path | None:
        path = self._cache.find(name)
        if path is None:
            return None
        try:
            await self._verify(self._storage_manifest, name, partial(self._check, name, path))
        except (errors.TransientError, errors.UnusableFileError) as error:
            log.warning(
                "fetching %s again: %s", path, error, extra={"action": "lora_dropped", "lora": name}
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
        async with self._cache.fetching(name):
            # Another worker of this machine may have fetched it meanwhile.
            return await self._in_cache(name) or await self._download(name)

    async def _download(self, name: str) -> Path:
        data = await self._blobs.read(f"{manifest.LORAS}/{name}{SUFFIX}", max_bytes=MAX_BYTES)
        if data is None:
            await self._blobs.check()  # without its container, the job is not at fault
            if self._directory and not self._directory.is_dir():
                # Unmounted, say: the jobs are not at fault.
                raise _unreadable(self._directory, "it does not exist")
            folder = f"{self._directory} or " if self._directory else ""
            raise errors.MissingFileError(
                f"no LoRA {name}{SUFFIX} in {folder}loras/ of the container {self._blobs.name!r}"
            )
        check = partial(check_content, name, BytesIO(data), len(data))
        await self._verify(self._storage_manifest, name, check)
        return await asyncio.to_thread(self._cache.store, name, data)

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
            protocol.check_blob_size(path.name, status.st_size, MAX_BYTES)
            with path.open("rb") as file:
                check_content(name, file, status.st_size, sha256)
        except OSError as error:
            raise errors.TransientError(
                f"the LoRA {path.name} cannot be read: {error.strerror or error}"
            ) from error
        self._checked[path] = seen


def _read(directory: Path | None) -> bytes | None:
    if directory is None:
        return None
    try:
        with (directory / manifest.NAME).open("rb") as file:
            return file.read(manifest.MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(directory, error.strerror) from error


def _unreadable(directory: Path | None, reason: str | None) -> errors.SetupError:
    return errors.SetupError(f"--lora-directory {directory} cannot be read: {reason}")

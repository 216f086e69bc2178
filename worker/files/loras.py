"""LoRA files: from a folder, or from `loras/` in the storage through the disk cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path

from imagefleet import errors
from imagefleet.storage import protocol
from worker.files.disk_cache import SUFFIX, DiskCache

log = logging.getLogger(__name__)

#: A manifest is read again after this time; a replaced LoRA is fetched again by then.
MANIFEST_SECONDS = 300.0

#: The format's own limit. Without one, eight stray bytes could ask for all memory.
_MAX_HEADER_BYTES = 100_000_000

#: What reading JSON of an unexpected shape may raise.
_MALFORMED = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, RecursionError),
)

#: The largest LoRA file: it is checked in memory before it is stored, and eight may arrive at once.
MAX_BYTES = 2**30

_MANIFEST = "manifest.json"


class Manifest:
    """The SHA-256 of LoRAs by name, `{"name": "sha256"}`; empty where there is no file."""

    def __init__(self, where: str, read: Callable[[], Awaitable[bytes | None]]) -> None:
        self._where = where
        self._read = read
        self._hashes: dict[str, str] = {}
        self._read_at: float | None = None

    async def sha256(self, name: str) -> str | None:
        """The hash that the file must have, or None where any will do.

        Raises:
            TransientError: the manifest cannot be read or is not valid.
        """
        if self._read_at is None or time.monotonic() - self._read_at > MANIFEST_SECONDS:
            content = await self._read() or b"{}"
            try:
                hashes = json.loads(content)
                self._hashes = {str(key): value.lower() for key, value in hashes.items()}
            except _MALFORMED as error:
                # It may be half-written; going on without it would mean to trust any file.
                raise errors.TransientError(
                    f'{self._where} is not a JSON manifest, {{"name": "sha256", ...}}: {error}'
                ) from error
            self._read_at = time.monotonic()
        return self._hashes.get(name)

    def forget(self) -> None:
        """Reads it again the next time: it and a file disagree, and one of them is old."""
        self._read_at = None


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
    start = file.read(8)
    if len(start) < 8:  # noqa: PLR2004 - the header's length
        return None
    header_bytes = int.from_bytes(start, "little")
    header = file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b"too long"
    if header[:1] in {b"", b"{"} and len(header) < header_bytes:
        return None
    try:
        entries: dict[str, dict[str, list[int]]] = json.loads(header)
        ends = [entry["data_offsets"][1] for key, entry in entries.items() if key[:2] != "__"]
        return int(8 + header_bytes + max(ends, default=0))
    except _MALFORMED as error:
        raise errors.UnusableFileError(
            f"the LoRA {name}.safetensors is not a safetensors file"
        ) from error


class LoraLibrary:
    """Resolves LoRA names to files. A name is one safe path segment, checked with the prompt."""

    def __init__(
        self, blobs: protocol.BlobStore, *, directory: Path | None, cache: Path, cache_bytes: int
    ) -> None:
        """*directory* comes before the storage."""
        self.lookups: Counter[str] = Counter()
        self._blobs = blobs
        self._directory = directory
        self._cache = DiskCache(cache, cache_bytes)
        self._fetches: dict[str, asyncio.Task[Path]] = {}
        self._storage_manifest = Manifest(
            f"loras/{_MANIFEST} in the storage", lambda: blobs.read(f"loras/{_MANIFEST}")
        )
        self._directory_manifest = Manifest(
            f"{directory}/{_MANIFEST}", lambda: asyncio.to_thread(_read, directory)
        )
        # What was checked in full, and against which hash: by path, modification time and size.
        self._checked: dict[Path, tuple[int, int, str | None]] = {}

    async def resolve(self, name: str) -> Path:
        """The file of the LoRA *name*, complete and matching its manifest.

        Raises:
            MissingFileError: it does not exist.
            UnusableFileError: it is too large, or not a safetensors file.
            TransientError: the storage did not answer, or the file is truncated or does not match.
            NodeError, SetupError: the cache cannot be written.
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
        if path is None or not path.is_file():
            return None
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
        data = await self._blobs.read(f"loras/{name}{SUFFIX}", max_bytes=MAX_BYTES)
        if data is None:
            folder = f"{self._directory} or " if self._directory else ""
            raise errors.MissingFileError(f"no LoRA {name}{SUFFIX} in {folder}the storage's loras/")
        check = partial(check_content, name, BytesIO(data), len(data))
        await self._verify(self._storage_manifest, name, check)
        return await asyncio.to_thread(self._cache.store, name, data)

    async def _verify(
        self, manifest: Manifest, name: str, check: Callable[[str | None], None]
    ) -> None:
        sha256 = await manifest.sha256(name)
        try:
            await asyncio.to_thread(check, sha256)
        except errors.TransientError:
            manifest.forget()  # one of the two may be old
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
    try:
        return (directory / _MANIFEST).read_bytes() if directory else None
    except FileNotFoundError:
        return None

"""Where a LoRA's file comes from: a folder, or the store's `loras/`, fetched once and kept."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from pathlib import Path

from jobs import errors, storage

_SUFFIX = ".safetensors"

#: Below these bytes a safetensors file has not even its header's length.
_HEADER_BYTES = 8


class LoraLibrary:
    """Resolves LoRA names to files. A name is known to be one safe path segment by now."""

    def __init__(
        self,
        blobs: storage.BlobStore,
        *,
        directory: Path | None,
        cache: Path,
        max_bytes: int,
    ) -> None:
        self.lookups: Counter[str] = Counter()
        self._blobs = blobs
        self._directory = directory
        self._cache = cache.expanduser()
        self._max_bytes = max_bytes
        self._fetches: dict[str, asyncio.Task[Path]] = {}

    async def resolve(self, name: str) -> Path:
        """The file of the LoRA *name*.

        Raises:
            MissingFileError: there is none; UnusableFileError: it is too large to be one;
            TransientError: the store could not be asked.
        """
        for folder in (self._directory, self._cache):
            if folder is not None and (path := folder / f"{name}{_SUFFIX}").is_file():
                self.lookups["hit"] += 1
                return self._checked(path)
        self.lookups["miss"] += 1
        fetch = self._fetches.get(name)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(name), name=f"fetch LoRA {name}")
            self._fetches[name] = fetch
            fetch.add_done_callback(self._fetched)
        # Shielded: several jobs wait for one fetch, and one of them may be called off.
        return await asyncio.shield(fetch)

    def _fetched(self, fetch: asyncio.Task[Path]) -> None:
        self._fetches = {name: task for name, task in self._fetches.items() if task is not fetch}
        if not fetch.cancelled():
            fetch.exception()  # seen, even where everybody who waited for it was called off

    async def _fetch(self, name: str) -> Path:
        data = await self._blobs.read(f"loras/{name}{_SUFFIX}")
        if data is None:
            places = f"{self._directory} or " if self._directory else ""
            raise errors.MissingFileError(
                f"there is no LoRA {name}{_SUFFIX} in {places}the store's loras/"
            )
        path = self._cache / f"{name}{_SUFFIX}"
        await asyncio.to_thread(_write_whole, path, data)
        return self._checked(path)

    def _checked(self, path: Path) -> Path:
        size = path.stat().st_size
        if not _HEADER_BYTES < size <= self._max_bytes:
            raise errors.UnusableFileError(
                f"the LoRA {path.name} has {size:,} bytes; at most {self._max_bytes:,} are accepted"
            )
        return path


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is either there in full or not at all, whoever else writes it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(temporary).replace(path)

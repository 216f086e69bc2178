"""Textual inversion embeddings, which prompts name by a plain word: which words name one.

On Azure that is what `embeddings/manifest.json` lists: tokens of workers cannot list a container.
A local storage's folder is used in place, like a folder of the settings, so that a file that is
put there by hand, or replaced, needs no manifest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from imagefleet import errors
from imagefleet.files.kinds import EMBEDDING
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from worker.files import addresses, manifest
from worker.files.disk_cache import SUFFIX
from worker.files.library import FileLibrary, Folder, own_folder, unreadable
from worker.files.manifest import Manifest

log = logging.getLogger(__name__)

#: Bytes of fetched embeddings kept on disk: thousands of them.
CACHE_BYTES = 256 * 2**20

#: The names are listed again after this time.
LIST_SECONDS = 300.0

#: The longest that a job waits for that: a storage that hangs must not hold up the GPU.
READ_SECONDS = 5.0


class EmbeddingLibrary(FileLibrary):
    """The embeddings of a folder, and of `embeddings/` in the storage."""

    def __init__(
        self,
        blobs: protocol.BlobStore,
        *,
        directory: Path | None,
        cache: Path,
        trusted: TrustedKeys | None = None,
    ) -> None:
        """*directory* comes before the storage, whose files one of the *trusted* keys must list."""
        stored = Manifest.stored(blobs, EMBEDDING.folder, trusted)
        own = [own_folder(EMBEDDING, directory)] if directory else []
        path = _local_path(blobs)
        super().__init__(
            blobs,
            EMBEDDING,
            stored,
            folders=[*own, *([Folder(path, stored, must_exist=False)] if path else [])],
            cache=cache,
            cache_bytes=CACHE_BYTES,
        )
        self._own = directory
        # With a trusted key, only the manifest counts.
        self._listed = [each for each in (directory, None if trusted else path) if each]
        self._names: tuple[str, ...] = ()
        self._pickles: dict[str, Path] = {}
        self._ignored: set[str] = set()
        self._listed_at: float | None = None
        self._listing = asyncio.Lock()
        self._hashes: dict[Path, tuple[int, int, str]] = {}

    async def names(self) -> tuple[str, ...]:
        """All names, sorted; the same object as before if none is new or gone.

        Listed anew every few minutes; where that fails, what was listed last stays in force.

        Raises:
            TransientError: they could not be listed yet; SetupError: the operator has to act.
        """
        async with self._listing:
            now = time.monotonic()
            if self._listed_at is not None and now - self._listed_at <= LIST_SECONDS:
                return self._names
            is_first = self._listed_at is None
            try:
                async with asyncio.timeout(None if is_first else READ_SECONDS):
                    found = await self._list()
            except (errors.TransientError, TimeoutError) as error:
                if is_first:
                    # Every job needs the list: retrying them would fail them all.
                    if isinstance(error, manifest.DamagedError):
                        raise errors.SetupError(error.message) from error
                    raise
                log.warning(
                    "embeddings cannot be listed, new ones are not used yet: %s",
                    error if isinstance(error, errors.FleetError) else "no answer",
                    extra={"action": "embeddings_unlisted"},
                )
            else:
                if found != self._names:
                    self._names = found
                    log.info(
                        "embeddings that prompts may name: %d",
                        len(found),
                        extra={"action": "embeddings_listed", "embeddings": len(found)},
                    )
            self._listed_at = now
            return self._names

    async def resolve_hashed(self, name: str) -> tuple[Path, str]:
        """The file of that name and its SHA-256; raises as `resolve`.

        Also UnusableFileError: it is a pickle.
        """
        if pickle := self._pickles.get(name):
            raise errors.UnusableFileError(
                f"the embedding {name!r}, which the prompt names, is {pickle.name},"
                f" {addresses.pickle_advice(str(pickle), is_embedding=True)}"
            )
        path = await self.resolve(name)
        return path, await asyncio.to_thread(self._sha256, path)

    async def _list(self) -> tuple[str, ...]:
        listed = set(await self._storage_manifest.names())
        files: list[Path] = []
        for folder in self._listed:
            files += await asyncio.to_thread(self._files, folder)
        names = {name for name in listed if self._is_safe(name)}
        names |= {path.stem for path in files if path.suffix == SUFFIX}
        self._pickles = {
            path.stem: path
            for path in files
            if path.suffix in addresses.PICKLE_SUFFIXES and path.stem not in names
        }
        return tuple(sorted(names | self._pickles.keys()))

    def _files(self, folder: Path) -> list[Path]:
        try:
            files = list(folder.iterdir())
        except FileNotFoundError:
            if folder != self._own:
                return []
            raise unreadable(EMBEDDING, folder, "it does not exist") from None
        except OSError as error:
            raise unreadable(EMBEDDING, folder, error.strerror) from error
        wanted = {SUFFIX, *addresses.PICKLE_SUFFIXES}
        return [each for each in files if each.suffix in wanted and self._is_safe(each.stem)]

    def _is_safe(self, name: str) -> bool:
        is_safe = SAFE_NAME.fullmatch(name) is not None
        if not is_safe and name not in self._ignored:
            self._ignored.add(name)
            log.warning(
                "the embedding %r is left out: its name may have letters, digits, spaces and"
                " _ . + ( ) - only",
                name[:80],
                extra={"action": "embedding_left_out"},
            )
        return is_safe

    def _sha256(self, path: Path) -> str:
        try:
            status = path.stat()
            seen = self._hashes.get(path)
            if seen is not None and seen[:2] == (status.st_mtime_ns, status.st_size):
                return seen[2]
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise errors.TransientError(
                f"the embedding {path.name} cannot be read: {error.strerror or error}"
            ) from error
        self._hashes[path] = (status.st_mtime_ns, status.st_size, sha256)
        return sha256


def _local_path(blobs: protocol.BlobStore) -> Path | None:
    """The folder of embeddings of a local storage."""
    address = urlparse(blobs.address(EMBEDDING.folder))
    return Path(url2pathname(address.path)) if address.scheme == "file" else None

"""Files that prompts name, from a folder, or from the storage through the disk cache."""

import asyncio
import contextlib
import hashlib
import os
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader, BytesIO
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse
from urllib.request import url2pathname

from cachetools import LRUCache, TTLCache

from imagefleet import concurrency
from imagefleet.errors import (
    FleetError,
    MissingFileError,
    SetupError,
    TransientError,
    UnusableFileError,
)
from imagefleet.files import lora, safetensors
from imagefleet.files.kinds import EMBEDDING, LORA, FileKind
from imagefleet.files.safetensors import (
    Identity,
    MalformedError,
    TruncatedError,
    identify,
    rested,
    whole,
)
from imagefleet.job.prompt import SAFE_NAMES, is_safe_name
from imagefleet.signing import TrustedKeys
from imagefleet.storage import protocol
from imagefleet.storage.protocol import BlobStore
from imagefleet.telemetry.logs import log
from worker.files import addresses, manifest
from worker.files.disk_cache import SUFFIX, DiskCache
from worker.files.manifest import Manifest

#: Files that are not checked again while they stay as they are. A campaign may use a million: the
#: text states of its prompts.
REMEMBERED = 10_000

#: The names of embeddings are listed again after this time.
LIST_SECONDS = 300.0

#: The longest that a job waits for the list: a storage that hangs must not hold up the GPU.
READ_SECONDS = 5.0


_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Source:
    """The storage that a worker fetches files from, and where it keeps them."""

    blobs: BlobStore
    #: It has a folder for each kind of file.
    cache: Path
    #: The most that is kept of each kind.
    cache_bytes: int
    #: One of these keys must list the files.
    trusted: TrustedKeys | None = None
    #: True if it holds nothing: all files are in folders of this machine.
    is_empty: bool = False


def check_content(
    kind: FileKind,
    name: str,
    file: BufferedReader | BytesIO,
    size: int,
    sha256: str | None,
) -> None:
    """Checks that a file is complete and matches the manifest.

    Raises TransientError if it is truncated or has another hash, UnusableFileError if it is none.
    """
    what = f"the {kind.noun} {name}{kind.suffixes[0]}"
    expected: int | None = size
    try:
        if kind.has_header:
            expected = safetensors.read_header(file).file_bytes
    except TruncatedError:
        expected = None
    except MalformedError as error:
        raise UnusableFileError(f"{what} is not a safetensors file") from error
    if expected is None or size < expected:
        raise TransientError(
            f"{what} is truncated: it has {size:,} bytes"
            + (f" of {expected:,}" if expected else "")
        )
    if sha256 is None:
        return
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        raise TransientError(
            f"the SHA-256 of {what} is not the one in its manifest.json"
        )


async def read_whole(
    blobs: BlobStore, name: str, max_bytes: int | None = None
) -> bytes | None:
    """A blob's bytes, as `BlobStore.read`; a local storage's folder is one that people copy into.

    Raises UnsettledFileError for a file there that may be half-written; one whose name is the hash
    of its bytes is whole.
    """
    stem = PurePosixPath(name).stem
    if _SHA256.fullmatch(stem):
        found = await blobs.read(name, max_bytes=max_bytes)
        if found is not None and hashlib.sha256(found).hexdigest() == stem:
            return found
    identity = await asyncio.to_thread(rested_blob, blobs, name)
    data = await blobs.read(name, max_bytes=max_bytes)
    if identity is not None:
        await asyncio.to_thread(safetensors.check_still, identity)
    return data


class FileLibrary:
    """Resolves names to files. A name is one safe path segment, checked with the prompt."""

    def __init__(
        self, source: Source, kind: FileKind, directory: Path | None = None
    ) -> None:
        """*directory* comes before the storage."""
        self.lookups: Counter[str] = Counter()
        self._blobs = source.blobs
        self._is_empty = source.is_empty
        self._kind = kind
        self._directory = directory
        #: Folders of such files on this machine, each with the list that they must match.
        self._folders: dict[Path, Manifest | None] = (
            {directory: None} if directory else {}
        )
        self._cache = DiskCache(
            source.cache / kind.folder, min(source.cache_bytes, kind.cached_bytes)
        )
        self._room = asyncio.Semaphore(kind.fetched_at_once)
        self._storage_manifest = Manifest.stored(source.blobs, kind, source.trusted)
        # The files of other names of theirs, for as long as a list of names.
        self._aliases: TTLCache[str, str] = TTLCache(REMEMBERED, LIST_SECONDS)
        # Files in folders within these, by their names, for as long as a list of names.
        self._deeper: TTLCache[Path, dict[str, list[str]]] = TTLCache(
            REMEMBERED, LIST_SECONDS
        )
        # What was checked in full, and against which hash.
        self._checked: LRUCache[Path, tuple[Identity, str | None]] = LRUCache(
            REMEMBERED
        )

    async def resolve(self, name: str) -> Path:
        """The file of that name, complete and matching its manifest; waits for new credentials.

        Raises:
            MissingFileError: it does not exist, or a signed manifest does not list it.
            UnusableFileError: it is too large, or not a safetensors file.
            TransientError: the storage did not answer, or the file is truncated or does not match.
            UnsettledFileError: the file may be half-written.
            NodeError, SetupError: as `DiskCache.errors` and `Manifest.sha256`.

        A LoRA's alias finds its file where no file has the name, and where it is of one alone.
        """
        return await concurrency.UNTIL_ACCESS.call(partial(self._find, name))

    async def _find(self, name: str) -> Path:
        try:
            return await self._resolve(self._aliases.get(name, name))
        except MissingFileError as missing:
            files = await self._named_otherwise(name) if self._kind is LORA else set()
            if not files:
                raise
            if len(files) > 1:
                several = ", ".join(map(repr, sorted(files)[:3]))
                raise MissingFileError(
                    f"{missing.message}; {name!r} is an alias of several: name"
                    f" {several}"
                ) from None
            (self._aliases[name],) = files
            return await self._resolve(self._aliases[name])

    async def _named_otherwise(self, name: str) -> set[str]:
        """The names of the files that *name* is an alias of, in the first place that has any."""
        stored = local_path(self._blobs, self._kind.folder)
        for folder in (*self._folders, stored):
            if folder and (
                found := (await asyncio.to_thread(aliases, folder)).get(name)
            ):
                return found
        return self._storage_manifest.same_as(name)

    async def _resolve(self, name: str) -> Path:
        path = await self._in_folders(name) or await self._in_cache(name)
        self.lookups["hit" if path else "miss"] += 1
        return path or await self._fetch(name)

    def identity(self, path: Path) -> Identity:
        """Identity that a file returned by `resolve` had when it was checked."""
        checked = self._checked.get(path)
        return checked[0] if checked else identify(path)

    async def _in_folders(self, name: str) -> Path | None:
        for folder, listed in self._folders.items():
            path = folder / f"{name}{self._kind.suffixes[0]}"
            try:
                if not path.is_file():
                    deeper = await self._in_subfolder(name, folder)
                    if deeper is None:
                        continue
                    path = deeper
            except OSError as error:
                raise unreadable(self._kind, folder, error) from error
            check = partial(self._check, name, path, rested)
            return await self._verify(listed, name, check)
        return None

    async def _in_subfolder(self, name: str, folder: Path) -> Path | None:
        """The file of that name in the folders within *folder*.

        AUTOMATIC1111 finds files by their names wherever they lie. Raises MissingFileError if there
        are several.
        """
        found = self._deeper.get(folder)
        if found is None:
            found = {}
            for path in await asyncio.to_thread(list, walked(folder)):
                if path.name.endswith(self._kind.suffixes) and path.parent != folder:
                    found.setdefault(self._kind.stem(path.name), []).append(str(path))
            self._deeper[folder] = found
        paths = found.get(name, [])
        if len(paths) > 1:
            several = ", ".join(paths[:3])
            raise MissingFileError(
                f"there are several files of the {self._kind.noun} {name!r}, {several}: give each a"
                " name of its own"
            )
        return Path(paths[0]) if paths else None

    async def _in_cache(self, name: str) -> Path | None:
        path = self._cache.find(name)
        if path is None:
            return None
        check = partial(self._check, name, path, identify)
        try:
            return await self._verify(self._storage_manifest, name, check)
        except (TransientError, UnusableFileError) as error:
            log.warning(
                f"fetching {path} again: {error}", action=f"{self._kind.name}_dropped"
            )
            self._cache.drop(path)
            return None

    async def _fetch(self, name: str) -> Path:
        await self._storage_manifest.sha256(name)  # a broken one costs no download
        async with self._cache.fetching(name), self._room:
            # Another job, or another worker of this machine, may have fetched it meanwhile.
            return await self._in_cache(name) or await self._download(name)

    async def _download(self, name: str) -> Path:
        kind = self._kind
        blob = f"{kind.folder}/{name}{kind.suffixes[0]}"
        data = await read_whole(self._blobs, blob, kind.max_bytes)
        folder = local_path(self._blobs, kind.folder)
        if data is None and folder is not None and folder.is_dir():
            deeper = await self._in_subfolder(name, folder)
            if deeper is not None:
                blob = f"{kind.folder}/{deeper.relative_to(folder).as_posix()}"
                data = await read_whole(self._blobs, blob, kind.max_bytes)
        if data is None:
            await self._blobs.check()  # without its container, the job is not at fault
            if self._directory and not self._directory.is_dir():
                # Unmounted, say: the jobs are not at fault.
                raise unreadable(kind, self._directory, FileNotFoundError())
            raise MissingFileError(
                f"no {kind.noun} {name}{kind.suffixes[0]}{self._places}"
            )
        store = partial(self._store, name, data)
        return await self._verify(self._storage_manifest, name, store)

    @property
    def _places(self) -> str:
        """Where files are looked for, in the words of whoever set it up."""
        kind = self._kind
        folders = " or ".join(map(str, self._folders))
        if self._is_empty:
            folder = f"the {kind.noun} folder"
            return f" in {folder} {folders}" if folders else f": {folder} is not set"
        stored = f"{kind.folder}/ of the container {self._blobs.name!r}"
        return f" in {folders} or {stored}" if folders else f" in {stored}"

    async def _verify(
        self, listed: Manifest | None, name: str, check: Callable[[str | None], Path]
    ) -> Path:
        sha256 = await listed.sha256(name) if listed else None
        try:
            return await asyncio.to_thread(check, sha256)
        except TransientError:
            if listed:
                listed.forget()  # one of the two may be old
            raise

    def _store(self, name: str, data: bytes, sha256: str | None) -> Path:
        """Checks a fetched file, then stores it: a bad one must not evict good ones."""
        check_content(self._kind, name, BytesIO(data), len(data), sha256)
        path = self._cache.store(name, data)
        self._checked[path] = identify(path), sha256
        return path

    def _check(
        self,
        name: str,
        path: Path,
        find: Callable[[Path], Identity],
        sha256: str | None,
    ) -> Path:
        """Checks a file; *find* its identity, which of one that others write waits for its rest."""
        with reading(self._kind, path):
            seen = find(path)
            if self._checked.get(path) == (seen, sha256):
                return path
            size = seen[2]
            protocol.check_blob_size(path.name, size, self._kind.max_bytes)
            with whole(seen), path.open("rb") as file:
                check_content(self._kind, name, file, size, sha256)
        self._checked[path] = seen, sha256
        return path


@contextlib.contextmanager
def reading(kind: FileKind, path: Path) -> Iterator[None]:
    """Raises TransientError for an OSError in the block, which reads the file at *path*."""
    try:
        yield
    except OSError as error:
        raise TransientError(
            f"the {kind.noun} {path.name} cannot be read: {error.strerror or error}"
        ) from error


def unreadable(kind: FileKind, path: Path, error: OSError) -> SetupError:
    is_missing = isinstance(error, FileNotFoundError)
    reason = "it does not exist" if is_missing else error.strerror
    return SetupError(f"{kind.flag} {path} cannot be read: {reason}")


class EmbeddingLibrary(FileLibrary):
    """The embeddings of a folder, and of `embeddings/` in the storage."""

    def __init__(self, source: Source, directory: Path | None = None) -> None:
        super().__init__(source, EMBEDDING, directory)
        if path := local_path(source.blobs, EMBEDDING.folder):
            self._folders[path] = self._storage_manifest
        # With a trusted key, only the manifest counts.
        self._listed = [
            each for each in (directory, None if source.trusted else path) if each
        ]
        self._names: tuple[str, ...] = ()
        self._pickles: dict[str, Path] = {}
        self._ignored: set[str] = set()
        self._listed_at: float | None = None
        self._listing = asyncio.Lock()

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
            except (TransientError, TimeoutError) as error:
                if is_first:
                    # Every job needs the list: retrying them would fail them all.
                    if isinstance(error, manifest.DamagedError):
                        raise SetupError(error.message) from error
                    raise
                why = error if isinstance(error, FleetError) else "no answer"
                log.warning(
                    f"embeddings cannot be listed: {why}", action="embeddings_unlisted"
                )
            else:
                if found != self._names:
                    self._names = found
                    log.info(
                        f"{len(found)} embeddings are listed",
                        action="embeddings_listed",
                    )
            self._listed_at = now
            return self._names

    async def resolve_hashed(self, name: str) -> tuple[Path, str]:
        """The file and its SHA-256; raises as `resolve`, and UnusableFileError for a pickle."""
        if pickle := self._pickles.get(name):
            raise UnusableFileError(
                f"the embedding {name!r}, which the prompt names, is {pickle.name},"
                f" {addresses.pickle_advice(str(pickle), is_embedding=True)}"
            )
        path = await self.resolve(name)
        with reading(EMBEDDING, path):
            return path, await asyncio.to_thread(lambda: _hash(self.identity(path)))

    async def _list(self) -> tuple[str, ...]:
        names = set(filter(self._is_safe, await self._storage_manifest.names()))
        pickles: dict[str, Path] = {}
        for folder in self._listed:
            for path in await asyncio.to_thread(self._files, folder):
                if path.suffix == SUFFIX:
                    names.add(path.stem)
                else:
                    pickles[path.stem] = path
        for name in names & pickles.keys():  # it has a file that can be read
            del pickles[name]
        self._pickles = pickles
        return tuple(sorted(names | pickles.keys()))

    def _files(self, folder: Path) -> list[Path]:
        try:
            files = list(walked(folder))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and folder != self._directory:
                return []
            raise unreadable(EMBEDDING, folder, error) from error
        wanted = {SUFFIX, *addresses.PICKLE_SUFFIXES}
        return [
            each for each in files if each.suffix in wanted and self._is_safe(each.stem)
        ]

    def _is_safe(self, name: str) -> bool:
        is_safe = is_safe_name(name)
        if not is_safe and name not in self._ignored:
            self._ignored.add(name)
            log.warning(
                f"{name[:80]!r} is no name of an embedding: {SAFE_NAMES}",
                action="embedding_left_out",
            )
        return is_safe


@lru_cache(REMEMBERED)
def _hash(identity: Identity) -> str:
    with whole(identity):
        return safetensors.sha256_of(Path(identity[0]))


def names(folder: Path) -> list[str]:
    """The names of a folder's files; none if it cannot be read."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        found.update(path.stem for path in walked(folder) if path.suffix == SUFFIX)
    return sorted(found)


def aliases(folder: Path) -> dict[str, set[str]]:
    """The names of a folder's LoRAs by their aliases; of what cannot be read, nothing.

    A file's name counts as one, too: some file systems spell it otherwise.
    """
    found: dict[str, set[str]] = {}
    with contextlib.suppress(OSError):
        for path in walked(folder):
            if path.suffix != SUFFIX:
                continue
            with contextlib.suppress(OSError, MalformedError):
                for name in (
                    unicodedata.normalize("NFC", path.stem),
                    _alias(identify(path)),
                ):
                    found.setdefault(name, set()).add(path.stem)
    found.pop("", None)
    return found


def walked(folder: Path) -> Iterator[Path]:
    """The files of a folder and of all folders within it, linked ones too, each folder once.

    Raises OSError if the folder itself cannot be read.
    """

    def fail(error: OSError) -> None:
        if error.filename == str(folder):
            raise error

    seen = set[str]()
    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(root, name) for name in sorted(files))


@lru_cache(REMEMBERED)
def _alias(identity: Identity) -> str:
    with Path(identity[0]).open("rb") as file:
        return lora.alias_of(safetensors.read_header(file))


def local_path(blobs: BlobStore, name: str) -> Path | None:
    """A blob's file, on a local storage."""
    address = urlparse(blobs.address(name))
    return Path(url2pathname(address.path)) if address.scheme == "file" else None


def rested_blob(blobs: BlobStore, name: str) -> Identity | None:
    """Identifies a blob's file on a local storage, if it exists; raises as `safetensors.rested`."""
    if path := local_path(blobs, name):
        with contextlib.suppress(OSError):  # its reader will say why
            return rested(path)
    return None

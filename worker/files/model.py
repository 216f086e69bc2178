"""A model that is fetched at the start: once for a machine, in as many tries as it takes.

The cache has a folder for each address and hash. What has arrived stays there as NAME.part, over
broken connections and restarts; the model itself appears in one step, checked and whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import re
import shutil
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from yarl import URL

from imagefleet import errors, retry
from imagefleet.storage import protocol
from worker.files.sources import HttpSource, ModelChangedError, Opened, Source, StoreSource
from worker.salad.wait_for_operator import unless
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

STORE_SCHEME = "store:"

_IS_ADDRESS = re.compile(r"https?://", re.IGNORECASE)

#: A plain name, and one of the two forms that a model travels in.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,150}\.(safetensors|tar)")

#: A few minutes without a byte, on average.
STORAGE_RETRIES = retry.RetryPolicy(tries=15, longest_wait_seconds=30)

#: A connection that brought this much begins the count of tries anew: over a bad line, a large
#: file takes many.
PROGRESS_BYTES = 2**20

_SECONDS_BETWEEN_LOGS = 10.0

_SECONDS_BETWEEN_LOOKS = 0.5

#: Left free beside the model, for the images and logs of who else works here.
_SPARE_BYTES = 64 * 2**20

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass(frozen=True, slots=True)
class _Remote:
    """A model somewhere else, and the folder of the cache that is for it alone."""

    address: str
    name: str
    sha256: str | None
    folder: Path

    @property
    def is_tar(self) -> bool:
        return self.name.endswith(".tar")

    @property
    def place(self) -> Path:
        return self.folder / (self.name.removesuffix(".tar") if self.is_tar else self.name)

    def source(self, blobs: protocol.BlobStore) -> Source:
        if self.address.startswith(STORE_SCHEME):
            return StoreSource(blobs, self.address.removeprefix(STORE_SCHEME))
        return HttpSource(self.address, must_be_private=self.sha256 is None)


def place_of(settings: WorkerSettings) -> Path:
    """The path of the model on this machine, once it is fetched if it is to be.

    Raises:
        SetupError: it is neither a path nor an address that a model can be fetched from.
    """
    remote = _remote(settings)
    return Path(settings.model).expanduser() if remote is None else remote.place


async def fetched(
    settings: WorkerSettings,
    blobs: protocol.BlobStore,
    stop: asyncio.Event,
    retry_policy: retry.RetryPolicy = STORAGE_RETRIES,
) -> bool:
    """Fetches the model unless it is here; False if *stop* was set before.

    Raises:
        SetupError: the address, the token or the hash is wrong; NodeError: this machine has no
        room for the model; TransientError: nothing has come for minutes, for whoever's fault.
    """
    remote = _remote(settings)
    if remote is None or remote.place.exists():
        return True
    return await unless(stop, _fetch(remote, blobs, retry_policy))


def _remote(settings: WorkerSettings) -> _Remote | None:
    address, sha256 = settings.model, settings.model_sha256
    is_address = _IS_ADDRESS.match(address)
    if not is_address and not address.startswith(STORE_SCHEME):
        if sha256 is not None:
            raise errors.SetupError("--model-sha256 is for a model that is fetched; this is a path")
        return None
    if address.lower().startswith("http:") and sha256 is None:
        raise errors.SetupError(
            "a model over plain http may be changed on its way: give --model-sha256, or https"
        )
    if is_address:
        # A token in the query is renewed; the model stays the same.
        identity, name = str(URL(address).with_query(None).with_user(None)), URL(address).name
    else:
        blob = address.removeprefix(STORE_SCHEME)
        try:
            protocol.check_blob_name(blob)
        except errors.JobError as error:
            raise errors.SetupError(f"the model cannot be fetched: {error.message}") from None
        identity = f"{settings.storage} {settings.container} {address}"
        name = blob.rpartition("/")[2]
    if not _FILE_NAME.fullmatch(name):
        raise errors.SetupError(
            f"the model {name[:80]!r} cannot be fetched: its name must end in .safetensors, or in"
            " .tar for a folder in diffusers' format"
        )
    sha256 = sha256.lower() if sha256 else None
    key = hashlib.sha256(f"{identity}\n{sha256}".encode()).hexdigest()[:16]
    return _Remote(address, name, sha256, settings.model_cache.expanduser() / key)


async def _fetch(
    remote: _Remote, blobs: protocol.BlobStore, retry_policy: retry.RetryPolicy
) -> None:
    with _disk_errors(remote.folder):
        remote.folder.mkdir(parents=True, exist_ok=True)
    source = remote.source(blobs)
    async with _alone(remote.folder):
        if remote.place.exists():
            return
        if remote.sha256 is None:
            log.warning(
                "%s is taken as it comes: --model-sha256 would tell if it is the right one",
                source.label,
                extra={"action": "model_unchecked"},
            )
        download = _Download(remote, source)
        await download.run(retry_policy)
        with _disk_errors(remote.folder):
            await asyncio.to_thread(_put_in_place, download.part, remote)
        log.info("the model is at %s", remote.place, extra={"action": "model_fetched"})


class _Download:
    """A file that grows to its full size, whatever comes between."""

    def __init__(self, remote: _Remote, source: Source) -> None:
        self.part = remote.folder / f"{remote.name}.part"
        self._state = remote.folder / f"{remote.name}.part.json"
        self._remote = remote
        self._source = source
        self._resumed = False
        self._told_at = -_SECONDS_BETWEEN_LOGS

    async def run(self, retry_policy: retry.RetryPolicy) -> None:
        """Raises SetupError if what arrives has another hash; TransientError: patience ended."""
        while True:
            while not await retry_policy.call(self._advance):
                pass
            found = await asyncio.to_thread(self._find_sha256)
            if self._remote.sha256 in {None, found}:
                return
            self._forget()
            if not self._resumed:
                raise errors.SetupError(
                    f"{self._source.label} has the SHA-256 {found}, not {self._remote.sha256} as"
                    " --model-sha256 says: one of the two is wrong"
                )
            # It came in parts, perhaps of two versions.
            self._resumed = False

    async def _advance(self) -> bool:
        """One connection's worth; tells whether all is there."""
        size, total, version = self._resume_point()
        if size == total:
            return True
        try:
            async with self._source.opened(size, version) as opened:
                size = self._begin(opened)
                return await self._receive(opened)
        except ModelChangedError:
            self._forget()
            raise
        except errors.TransientError as error:
            if self._size() - size < PROGRESS_BYTES:
                raise
            retry.log_retry(error)
            return False

    def _resume_point(self) -> tuple[int, int | None, str | None]:
        """Bytes that are here, of how many, and of which version."""
        try:
            state = json.loads(self._state.read_bytes())
            total, version = state["total_bytes"], state["version"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0, None, None
        if version is None and self._remote.sha256 is None:
            return 0, None, None  # nothing would tell if two versions were put together
        return self._size(), total, version

    def _begin(self, opened: Opened) -> int:
        size = opened.offset
        self._resumed = self._resumed or size > 0
        with _disk_errors(self._remote.folder):
            if opened.total_bytes is not None:
                rest = opened.total_bytes - size
                _check_room(self._remote, rest + opened.total_bytes * self._remote.is_tar)
            if size == 0:
                self.part.write_bytes(b"")
                state = {"total_bytes": opened.total_bytes, "version": opened.version}
                self._state.write_text(json.dumps(state), encoding="utf-8")
        return size

    async def _receive(self, opened: Opened) -> bool:
        size, began, before = opened.offset, time.monotonic(), opened.offset
        with _disk_errors(self._remote.folder):
            # Unbuffered: what a full disk refuses must be said here, and not once more on closing.
            file = self.part.open("r+b", buffering=0)
        with contextlib.closing(file):
            file.seek(size)
            async for chunk in opened.chunks:
                with _disk_errors(self._remote.folder):
                    await asyncio.to_thread(_write, file, chunk)
                size += len(chunk)
                self._tell(size, opened.total_bytes, (size - before, time.monotonic() - began))
            with _disk_errors(self._remote.folder):
                file.truncate()
        if opened.total_bytes not in {None, size}:
            raise errors.TransientError(f"{self._source.label} broke off")
        return True

    def _tell(self, size: int, total: int | None, rate: tuple[int, float]) -> None:
        now = time.monotonic()
        if now - self._told_at < _SECONDS_BETWEEN_LOGS and size != total:
            return
        self._told_at = now
        log.info(
            "fetching %s: %d of %s MB, %.0f MB/s",
            self._source.label,
            size / 1e6,
            "?" if total is None else f"{total / 1e6:.0f}",
            rate[0] / 1e6 / max(rate[1], 1e-3),
            extra={"action": "model_progress", "bytes": size, "total_bytes": total},
        )

    def _find_sha256(self) -> str:
        with _disk_errors(self._remote.folder), self.part.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _forget(self) -> None:
        with _disk_errors(self._remote.folder):
            self._state.unlink(missing_ok=True)
            self.part.unlink(missing_ok=True)


def _write(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _put_in_place(part: Path, remote: _Remote) -> None:
    if remote.is_tar:
        _unpack(part, remote)
        part.unlink()
    else:
        part.replace(remote.place)
    part.with_name(f"{part.name}.json").unlink(missing_ok=True)


def _unpack(archive: Path, remote: _Remote) -> None:
    """Unpacks the folder that has a model_index.json: the archive's own, or the one inside."""
    folder = remote.folder / "unpacking"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:") as tar:
            _check_room(remote, sum(member.size for member in tar))
            # Nothing outside the folder, no devices, no links that lead out of it.
            tar.extractall(folder, filter="data")
    except tarfile.TarError as error:
        archive.unlink()
        raise errors.SetupError(f"{remote.name} is no .tar that can be unpacked: {error}") from None
    for candidate in (folder, *folder.iterdir()):
        if (candidate / "model_index.json").is_file():
            candidate.replace(remote.place)
            shutil.rmtree(folder, ignore_errors=True)
            return
    raise errors.SetupError(
        f"{remote.name} holds no folder in diffusers' format: there is no model_index.json in it"
    )


def _check_room(remote: _Remote, needed_bytes: int) -> None:
    free = shutil.disk_usage(remote.folder).free
    if needed_bytes + _SPARE_BYTES > free:
        raise errors.NodeError(
            f"the model {remote.name} needs {needed_bytes / 1e6:,.0f} MB more in {remote.folder},"
            f" where {free / 1e6:,.0f} MB are free: take a larger disk or another --model-cache"
        )


@contextlib.asynccontextmanager
async def _alone(folder: Path) -> AsyncIterator[None]:
    """Lets one worker of the machine in at a time; the system lets go of one that was killed."""
    with _disk_errors(folder):
        file = (folder / "lock").open("wb")
    with contextlib.closing(file):
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    log.info("another worker fetches the model", extra={"action": "model_awaited"})
                    told = True
                await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        yield


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = errors.SetupError if error.errno in _REFUSED else errors.NodeError
        raise kind(
            f"the model cache {folder} cannot be written: {error.strerror or error}"
        ) from error

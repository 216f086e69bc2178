"""Fetched files on this machine's disk, in folders that several workers may share."""

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from filelock import AsyncFileLock

from imagefleet.errors import DISK_FULL, NodeError, SetupError
from imagefleet.telemetry.logs import log

#: A file used this recently stays, even above the limit: a worker is about to read it. If reading
#: starts later and the file is gone, the job is retried.
IN_USE_SECONDS = 60.0

#: Left free besides a model, for the images and logs of other programs.
SPARE_BYTES = 64 * 2**20

SUFFIX = ".safetensors"

#: Partial files of killed workers are removed after this time; no download takes as long.
_ABANDONED_SECONDS = 3600.0

#: Files of locks for fetches, which share them by a hash of their names: two wait for each other in
#: vain where both are among the few under way, and there are never more files than these.
_FETCH_LOCKS = 256

#: Seconds after which another worker's fetch is taken to hang: the file is fetched twice.
FETCH_SECONDS = 120.0


class DiskCache:
    """One folder; where *max_bytes* are given, the least recently used files are evicted.

    A file's access time is its last use; its modification time does not change, since the cache in
    memory compares it.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.folder = folder.expanduser()
        self._max_bytes = max_bytes
        self._storing = threading.Lock()

    def find(self, name: str) -> Path | None:
        """The file of that name, marked as used now."""
        path = self.folder / f"{name}{SUFFIX}"
        try:
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (
            OSError
        ) as error:  # the disk may be read-only; the file exists all the same
            log.debug(f"{path} cannot be marked as used: {error}")
        return path

    def drop(self, path: Path) -> None:
        with self.errors():
            path.unlink(missing_ok=True)

    def store(self, name: str, data: bytes) -> Path:
        """Writes a file atomically; raises NodeError or SetupError as `errors`."""
        path = self.folder / f"{name}{SUFFIX}"
        with self._storing, self.errors():
            try:
                self._evict(len(data))
                write(path, data)
            except OSError as error:
                if error.errno not in {*DISK_FULL, errno.ENOENT}:
                    raise
                # Another program took the room, or removed the folder.
                self._evict(len(data), least_bytes=len(data))
                write(path, data)
        return path

    def check_room(self, needed_bytes: int) -> None:
        """Raises NodeError if the disk has too little room for *needed_bytes* more."""
        free = shutil.disk_usage(self.folder).free
        if needed_bytes + SPARE_BYTES > free:
            raise NodeError(
                f"{needed_bytes / 1e6:,.0f} MB more are needed in {self.folder}, where"
                f" {free / 1e6:,.0f} MB are free: use a larger disk or another --cache"
            )

    @contextlib.asynccontextmanager
    async def fetching(
        self, name: str, seconds: float = FETCH_SECONDS
    ) -> AsyncIterator[None]:
        """Lets in one job of this machine's workers at a time that fetches the file of that name.

        The system frees a killed worker's lock; where there is none, and after so many *seconds*
        (-1: never), each fetches for itself.
        """
        number = zlib.crc32(name.encode()) % _FETCH_LOCKS
        lock = AsyncFileLock(self.folder / f"fetch-{number}.lock", poll_interval=0.05)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            await lock.acquire(timeout=seconds)
        except (OSError, NotImplementedError) as error:  # a Timeout is an OSError
            log.warning(f"{name} is fetched without a lock: {error}", action="no_lock")
        try:
            yield
        finally:
            await lock.release()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Translates OSError: permissions and names are for the operator, the rest is the node's.

        A job that was retried for it would use up its attempts on this worker.
        """
        try:
            yield
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise SetupError(
                f"the cache {self.folder} cannot be written: at {error.filename2 or error.filename}"
                " is a file in the place of a folder, or the reverse; move it away, or use another"
                " --cache"
            ) from error
        except OSError as error:
            if error.errno in DISK_FULL:
                raise NodeError(
                    f"the disk of the cache {self.folder} is full: use a larger disk or another"
                    " --cache"
                ) from error
            is_refused = error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}
            kind = SetupError if is_refused else NodeError
            raise kind(
                f"the cache {self.folder} cannot be written: {error.strerror or error}"
            ) from error

    def _evict(self, size: int, *, least_bytes: int = 0) -> None:
        """Makes room for *size* bytes, and removes *least_bytes* in any case, if they can be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        files = sorted(self._files(), key=lambda each: each[1].st_atime_ns)
        total = size + sum(status.st_size for _, status in files)
        excess = max(least_bytes, size - shutil.disk_usage(self.folder).free)
        if self._max_bytes is not None:
            excess = max(excess, total - self._max_bytes)
        for path, status in files:
            is_part = path.suffix != SUFFIX
            kept_seconds = _ABANDONED_SECONDS if is_part else IN_USE_SECONDS
            # A time in the future is one before the clock was set back.
            is_kept = abs(now - status.st_atime) < kept_seconds
            if is_kept or (excess <= 0 and not is_part):
                continue
            self.drop(path)
            excess -= status.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.iterdir():
            if path.suffix in {SUFFIX, ".part"}:
                with contextlib.suppress(
                    FileNotFoundError
                ):  # evicted by another worker
                    yield path, path.stat()


def write(target: Path, data: bytes) -> None:
    """Writes a file that appears in one step, complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)

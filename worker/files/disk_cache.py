"""LoRAs kept on this machine's disk; several workers may share the folder."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from imagefleet import errors

log = logging.getLogger(__name__)

#: A file used this recently stays, over the limit if need be: some job of some worker is about to
#: read it. Where that took longer and the file is gone, the job is tried again.
IN_USE_SECONDS = 60.0

#: What a worker that was killed left behind; no download takes this long.
_ABANDONED_SECONDS = 3600.0

SUFFIX = ".safetensors"


class LoraFolder:
    """Files of *max_bytes* in all, less on a disk that is full; the least recently used ones go.

    A file's access time is its last use; its modification time stays, since the memory's cache
    goes by that.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder.expanduser()
        self._max_bytes = max_bytes

    def find(self, name: str) -> Path | None:
        """The file of that name, marked as used just now."""
        path = self._folder / f"{name}{SUFFIX}"
        try:
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except FileNotFoundError:
            return None
        except OSError as error:  # on a disk that only reads, say: the file is there all the same
            log.debug("%s cannot be marked as used: %s", path, error)
        return path

    def drop(self, path: Path) -> None:
        """Removes a file; raises NodeError where the disk does not let it."""
        with self._translated():
            path.unlink(missing_ok=True)

    def store(self, name: str, data: bytes) -> Path:
        """Writes a file that is there in full or not at all, whoever else writes it too.

        Raises:
            NodeError: the disk does not take it.
        """
        path = self._folder / f"{name}{SUFFIX}"
        with self._translated():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".part")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                Path(temporary).replace(path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        return path

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Tried again here, every job with a LoRA would fail, and fast: this worker would eat up
            # the attempts of a whole queue.
            raise errors.NodeError(
                f"the LoRA cache {self._folder} cannot be written: {error.strerror or error}"
            ) from error

    def _make_room(self, size: int) -> None:
        now = time.time()
        files = sorted(self._files(), key=lambda each: each[1].st_atime_ns)
        total = size + sum(status.st_size for _, status in files)
        free = shutil.disk_usage(self._folder).free
        excess = max(total - self._max_bytes, size - free)
        for path, status in files:
            is_part = path.suffix != SUFFIX
            kept_seconds = _ABANDONED_SECONDS if is_part else IN_USE_SECONDS
            if now - status.st_atime < kept_seconds or (excess <= 0 and not is_part):
                continue
            self.drop(path)
            excess -= status.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.iterdir():
            if path.suffix in {SUFFIX, ".part"}:
                with contextlib.suppress(FileNotFoundError):  # another worker made room, too
                    yield path, path.stat()

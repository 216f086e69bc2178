"""A resumable download into a cache folder, verified by its hash."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from pydantic import BaseModel

from imagefleet import errors, retry
from worker.files.disk_cache import DiskCache
from worker.files.sources import FileChangedError, Opened, Source

log = logging.getLogger(__name__)

#: The format and the kind of a file are known by then.
HEAD_BYTES = 2**20

#: A connection that brought this much resets the count of tries: over a bad line, a large file
#: takes many.
PROGRESS_BYTES = 2**20

_SECONDS_BETWEEN_LOGS = 10.0


class _State(BaseModel):
    """What a partial file is of."""

    total_bytes: int | None
    version: str | None
    file_name: str | None = None


class Download:
    """A file that grows to its full size as NAME.part, over broken connections and restarts."""

    def __init__(
        self,
        cache: DiskCache,
        name: str,
        source: Source,
        sha256: str | None,
        *,
        copies: int,
        check: Callable[[Path, bool], None],
        on_progress: Callable[[int, int | None], None] = lambda _so_far, _total: None,
        stated_in: str = "--model-sha256",
    ) -> None:
        """*copies*: how often the file's size must fit on the disk; *stated_in*: who says *sha256*.

        *check* gets the partial file once its first `HEAD_BYTES` have arrived, and again when it is
        whole; it raises SetupError for what is not wanted, which is then removed.
        """
        self.file_name: str | None = None
        self.part = cache.folder / f"{name}.part"
        self._state = cache.folder / f"{name}.part.json"
        self._cache = cache
        self._source = source
        self._sha256 = sha256
        self._copies = copies
        self._check = check
        self._is_head_checked = False
        self._on_progress = on_progress
        self._stated_in = stated_in
        self._is_resumed = False
        self._logged_at = -_SECONDS_BETWEEN_LOGS

    async def run(self, retry_policy: retry.RetryPolicy) -> None:
        """Raises SetupError if the file is another; TransientError after the last try."""
        while True:
            while not await retry_policy.call(self._advance):
                pass
            try:
                self._check_content(is_whole=True)
            except FileChangedError:
                continue
            found = await asyncio.to_thread(self._find_sha256)
            if self._sha256 in {None, found}:
                return
            self.forget()
            if not self._is_resumed:
                raise errors.SetupError(
                    f"{self._source.label} has the SHA-256 {found}, not {self._sha256} as in"
                    f" {self._stated_in}: one of the two is wrong"
                )
            # It came in parts, perhaps of two versions.
            self._is_resumed = False

    def forget(self) -> None:
        """Removes the partial file, so that the next try starts anew."""
        self._is_head_checked = False
        self._cache.drop(self._state)
        self._cache.drop(self.part)

    async def _advance(self) -> bool:
        """Downloads over one connection; returns whether the file is complete."""
        size, total, version = self._resume_point()
        if size == total:
            return True
        try:
            async with self._source.opened(size, version) as opened:
                size = opened.offset
                await self._receive(opened)
                return True
        except FileChangedError:
            self.forget()
            raise
        except errors.TransientError as error:
            if self._size() - size < PROGRESS_BYTES:
                raise
            retry.log_retry(error)
            return False

    def _resume_point(self) -> tuple[int, int | None, str | None]:
        """Bytes on the disk, of how many, and of which version."""
        try:
            state = _State.model_validate_json(self._state.read_bytes())
        except (OSError, ValueError):
            return 0, None, None
        self.file_name = state.file_name
        if state.version is None and self._sha256 is None:
            return 0, None, None  # nothing would detect a mixture of two versions
        return self._size(), state.total_bytes, state.version

    async def _receive(self, opened: Opened) -> None:
        size, total, began_at = opened.offset, opened.total_bytes, time.monotonic()
        self._is_resumed = self._is_resumed or size > 0
        with self._cache.errors():
            if total is not None:
                self._cache.check_room(self._copies * total - size)
            if size == 0:
                self.part.write_bytes(b"")
                self.file_name = opened.file_name
                state = _State(
                    total_bytes=total, version=opened.version, file_name=opened.file_name
                )
                self._state.write_text(state.model_dump_json(), encoding="utf-8")
            # Unbuffered: a full disk must raise here, and not once more on closing.
            file = self.part.open("r+b", buffering=0)
        with contextlib.closing(file):
            file.seek(size)
            async for chunk in opened.chunks:
                with self._cache.errors():
                    await asyncio.to_thread(_write, file, chunk)
                size += len(chunk)
                self._on_progress(size, total)
                if size >= HEAD_BYTES and not self._is_head_checked:
                    self._check_content(is_whole=False)
                bytes_per_second = (size - opened.offset) / max(time.monotonic() - began_at, 1e-3)
                self._log_progress(size, total, bytes_per_second)
            with self._cache.errors():
                file.truncate()
        if total not in {None, size}:
            raise errors.TransientError(f"the connection to {self._source.label} broke off")

    def _check_content(self, *, is_whole: bool) -> None:
        self._is_head_checked = True
        with self._cache.errors():
            try:
                self._check(self.part, is_whole)
            except errors.SetupError as error:
                self.forget()
                if not self._is_resumed:
                    raise
                # It came in parts, perhaps of two versions.
                self._is_resumed = False
                raise FileChangedError(error.message) from error

    def _log_progress(self, size: int, total: int | None, bytes_per_second: float) -> None:
        now = time.monotonic()
        if now - self._logged_at < _SECONDS_BETWEEN_LOGS and size != total:
            return
        self._logged_at = now
        log.info(
            "fetching %s: %d of %s MB, %.0f MB/s",
            self._source.label,
            size / 1e6,
            "?" if total is None else f"{total / 1e6:.0f}",
            bytes_per_second / 1e6,
            extra={"action": "model_progress", "bytes": size, "total_bytes": total},
        )

    def _find_sha256(self) -> str:
        with self._cache.errors(), self.part.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


def _write(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]

"""A machine's kernels: one worker compiles them, the others and later ones find them cached."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)


def kernel_cache() -> Path:
    """Torch's folder of compiled kernels, which the processes of a user share."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


@contextlib.contextmanager
def by_one_first(folder: Path, what: str) -> Iterator[None]:
    """Runs the block, which compiles *what* into *folder*, in one process before any other.

    The system frees the lock of a worker that dies; the next one then compiles.
    """
    name = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
    done = folder / f"imagefleet-{name}.compiled"
    lock = FileLock(folder / f"imagefleet-{name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not done.exists():
            _acquire(lock)
    except OSError as error:
        log.warning(
            "compiling without waiting for other workers: %s", error, extra={"action": "no_lock"}
        )
    try:
        if done.exists():
            lock.release()  # all others go on at once
        yield
        with contextlib.suppress(OSError):
            done.touch()
    finally:
        lock.release()


def _acquire(lock: FileLock) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for another worker's kernels", extra={"action": "compile_awaited"})
        lock.acquire()

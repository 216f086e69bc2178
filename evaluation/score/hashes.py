"""The SHA-256 of files: what has not changed since it was read is not read again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from evaluation.score import extractors
from fleet import console

#: A file that changed so shortly before it was read may change again within one tick of the clock.
_RESTED_SECONDS = 2.0

_State = tuple[int, int, int, int, int]
_KNOWN = TypeAdapter(dict[str, tuple[_State, str]])


class Hashes:
    """Of files whose size, times and inode are kept in *store* with what they hashed to."""

    def __init__(self, store: Path) -> None:
        self._store = store
        try:
            self._known = _KNOWN.validate_json(store.read_bytes())
        except (OSError, ValidationError):
            self._known = {}

    def of(self, path: Path) -> str:
        """Raises SetupError if the file cannot be read."""
        key, now = str(path.absolute()), time.time()
        before = _state(path)
        known = self._known.get(key)
        if known is not None and known[0] == before:
            return known[1]
        self._known.pop(key, None)
        found = extractors.sha256_of(path)
        if before is not None and before == _state(path):
            changed_at = max(before[-2:]) / 1e9
            if now - changed_at > _RESTED_SECONDS:
                self._known[key] = before, found
        return found

    def keep(self) -> None:
        console.write_file(self._store, _KNOWN.dump_json(self._known))


def _state(path: Path) -> _State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # Who sets a file's time back, as `cp -p` does, cannot set that of its last change.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def of_all(hashes: Iterable[str]) -> str:
    """That of a set of files, whatever their names and order."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()

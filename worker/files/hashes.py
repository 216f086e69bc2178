"""AUTOMATIC1111's hashes of models and LoRAs, by which its users and galleries find them.

They are read or computed on threads of their own while the GPU draws, once for each file: only an
image that is ready to be encoded waits for them. Most LoRAs name their hash themselves, as their
trainer wrote it there; a checkpoint's is noted in the worker's cache.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

from cachetools import LRUCache

from imagefleet.files import safetensors

log = logging.getLogger(__name__)

#: Characters in the hash of a checkpoint's file ("AutoV2"), and of a LoRA.
MODEL_CHARACTERS = 10
LORA_CHARACTERS = 12

#: The most files whose hashes this process remembers.
_REMEMBERED = 10_000

#: A LoRA of 27 MB that does not name its hash takes 25 ms of a core, one of 144 MB 130 ms: two keep
#: up with any GPU, even if every job has another.
_THREADS = 2

#: The hash in a LoRA's header of all that follows the header, from its trainer. JSON escapes the
#: quotes of any text in which this might stand otherwise.
_NAMED = re.compile(rb'"sshs_model_hash" ?: ?"([0-9a-fA-F]{12,64})"')

_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileHashes:
    """Hashes of files, each in the background and once; None for what has none."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache.expanduser() / "hashes"
        self._found: LRUCache[Hashable, Future[str | None]] = LRUCache(_REMEMBERED)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "hashes")

    def of_model(self, path: Path, sha256: str | None = None) -> Future[str | None]:
        """The hash of a checkpoint's single file; None for a folder. *sha256* if it is known."""
        is_file = path.is_file()
        if is_file and sha256 is None:
            return self._start("model", path, self._hash_model)
        known: Future[str | None] = Future()
        known.set_result(sha256.lower()[:MODEL_CHARACTERS] if is_file and sha256 else None)
        return known

    def of_lora(self, path: Path) -> Future[str | None]:
        return self._start("lora", path, _hash_lora)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(
        self, kind: str, path: Path, read: Callable[[Path], str | None]
    ) -> Future[str | None]:
        try:
            status = path.stat()
        except OSError:
            key: Hashable = (kind, path)  # its reader will say why
        else:
            key = (kind, path, status.st_mtime_ns, status.st_size)
        with self._lock:
            found = self._found.get(key)
            if found is None or found.cancelled():
                found = self._found[key] = self._threads.submit(_try, read, path)
            return found

    def _hash_model(self, path: Path) -> str:
        status = path.stat()
        facts = f"{path.resolve()}\n{status.st_mtime_ns}\n{status.st_size}"
        name = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        note = self._folder / f"{name}.sha256"
        try:
            noted = note.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            noted = ""
        if not _SHA256.fullmatch(noted):
            with path.open("rb") as file:
                noted = hashlib.file_digest(file, "sha256").hexdigest()
            self._write(note, noted)
        return noted[:MODEL_CHARACTERS]

    def _write(self, note: Path, sha256: str) -> None:
        """Workers of one machine may write it at once; they write the same."""
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(sha256 + "\n", encoding="ascii")
        except OSError as error:  # it is computed again after the next start
            log.debug("%s cannot be written: %s", note, error)


def _try(read: Callable[[Path], str | None], path: Path) -> str | None:
    try:
        return read(path)
    except (OSError, safetensors.MalformedError) as error:
        log.warning(
            "the hash of %s is left out of its images: %s",
            path.name,
            str(error) or "it is damaged",
            extra={"action": "hash_unknown"},
        )
        return None


def _hash_lora(path: Path) -> str:
    """The hash of all but the header, as kohya's additional networks have it."""
    with path.open("rb") as file:
        named = _NAMED.search(_header(file))
        sha256 = named[1].decode() if named else hashlib.file_digest(file, "sha256").hexdigest()
    return sha256[:LORA_CHARACTERS]


def _header(file: BufferedReader) -> bytes:
    size = int.from_bytes(file.read(safetensors.LENGTH_BYTES), "little")
    if size > safetensors.MAX_HEADER_BYTES:
        raise safetensors.MalformedError
    return file.read(size)

"""Files that appear whole or not at all, and names that are safe in any folder."""

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from imagefleet.errors import DISK_FULL, SetupError
from imagefleet.storage.local.blobs import sync


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A draft beside *path* that takes its name at the end; raises SetupError if it cannot."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            yield path  # /dev/stdout, say
            return
        path = path.resolve()  # a link stays one
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            yield draft
            sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the errors of files below *path* into SetupErrors, except for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise SetupError(
            f"cannot write {error.filename or path}: {error.strerror or error}"
        ) from None
    except sqlite3.Error as error:
        raise SetupError(f"cannot write {path}: {error}") from None


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def ignores_case(folder: Path) -> bool:
    """True for a folder in which `A` and `a` are the same file, as on macOS and Windows."""
    probe = folder / f"case-{os.getpid()}"
    probe.touch()
    try:
        return probe.with_name(probe.name.upper()).exists()
    finally:
        probe.unlink()


def without_case(name: str) -> str:
    """A name that differs from other names not only in capitals."""
    if name == name.lower():
        return name
    stem, dot, suffix = name.rpartition(".")
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{stem or suffix}~{digest}" + (f"{dot}{suffix}" if stem else "")

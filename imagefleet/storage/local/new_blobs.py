"""Creates a blob in a folder: atomically, and durable when `create` returns.

A blob is written and synced under a temporary name, then linked to its own, and last its folder is
synced.
"""

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from imagefleet import errors

#: Folders beside the blobs in their folder; no segment of a blob's name starts with a dot.
METADATA_FOLDER = ".metadata"
TEMPORARY_FOLDER = ".temporary"

_IN_THE_WAY = (FileExistsError, IsADirectoryError, NotADirectoryError)
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP})


def create(
    root: Path, name: str, write: Callable[[BinaryIO], object], details: bytes
) -> bool:
    """Creates a blob of what *write* writes, and its sidecar; False if its name is taken."""
    path = root / name
    if not (is_taken := path.is_file()):
        for folder in (TEMPORARY_FOLDER, METADATA_FOLDER):
            (root / folder).mkdir(exist_ok=True)
        draft = root / TEMPORARY_FOLDER / uuid.uuid4().hex
        sidecar = draft.with_suffix(".json")
        try:
            with draft.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            sidecar.write_bytes(details)  # not synced: no job depends on it
            with _alone(root):
                if not (is_taken := path.is_file()):
                    # The sidecar before the file, so that none is without.
                    metadata = root / METADATA_FOLDER / f"{name}.json"
                    _in_folder(metadata, root, sidecar.replace)
                    _in_folder(path, root, partial(os.link, draft))
        finally:
            for leftover in (draft, sidecar):
                leftover.unlink(missing_ok=True)
    # Also of one that somebody else has created: the message is deleted next, which reaches the
    # disk with a later send or checkpoint, and a power failure must not lose both.
    sync(path.parent)
    return not is_taken


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keeps others out, in whatever process, lest a sidecar be another's than its file."""
    folder = os.open(root / METADATA_FOLDER, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _in_folder(path: Path, root: Path, rename: Callable[[Path], object]) -> None:
    """Calls *rename*, which gives a file the name *path*; makes its folder if need be."""
    try:
        rename(path)
    except FileNotFoundError:
        make_durable_folder(path.parent, root)
        rename(path)


def translated(error: OSError, folder: Path) -> errors.FleetError:
    """Translates the system's error into one that names *folder* and what to do."""
    if error.errno in errors.DISK_FULL:
        return errors.StorageFullError(
            f"the disk is full: cannot write to {folder}; free space"
        )
    if error.errno in _REFUSED:
        return errors.SetupError(f"no access to {folder}: {error.strerror}")
    if isinstance(error, _IN_THE_WAY):
        return errors.SetupError(
            f"{error.filename2 or error.filename} is in the way: a file where there should be"
            " a folder, or the reverse; move it away"
        )
    if not folder.is_dir():
        return no_folder(folder)
    return errors.TransientError(f"{folder}: {error.strerror or error}")


def no_folder(folder: Path) -> errors.MissingResourceError:
    return errors.MissingResourceError(
        f"there is no folder {folder}; `imagefleet load` creates it"
    )


def make_durable_folder(folder: Path, root: Path) -> None:
    """Makes a folder, synced to the disk; *root*, which somebody may have deleted, is not made."""
    if folder != root and not folder.exists():
        make_durable_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path | str) -> None:
    """Returns once the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

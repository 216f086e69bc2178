"""Creates blobs in a folder: each atomically, and durable when `create` returns.

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
    folder: Path, name: str, write: Callable[[BinaryIO], object], details: bytes
) -> bool:
    """Creates a blob of what *write* puts into its file; False if its name is taken.

    *details* are the text of its sidecar. Raises OSError, and SetupError without the *folder*.
    """
    path = folder / name
    draft = folder / TEMPORARY_FOLDER / uuid.uuid4().hex
    sidecar = draft.with_suffix(".json")
    is_new = False
    try:
        if not path.is_file():
            if not folder.is_dir():
                raise no_folder(folder)
            draft.parent.mkdir(exist_ok=True)
            sidecar.write_bytes(details)  # not synced: no job depends on it
            with draft.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            with _alone(folder):
                is_new = not path.is_file() and _link(draft, sidecar, folder, name)
    finally:
        draft.unlink(missing_ok=True)
        sidecar.unlink(missing_ok=True)
    # Also of one that somebody else has created: the message is deleted next, which reaches the
    # disk with a later send or checkpoint, and a power failure must not lose both.
    sync(path.parent)
    return is_new


def _link(draft: Path, sidecar: Path, folder: Path, name: str) -> bool:
    """Gives a finished file its name, and its sidecar before, so that none is without."""
    path = folder / name
    own = folder / METADATA_FOLDER / f"{name}.json"
    _in_folder(own, folder, partial(sidecar.replace, own))
    try:
        _in_folder(path, folder, partial(path.hardlink_to, draft))
    except FileExistsError:
        if not path.is_file():
            raise
        return False
    return True


def _in_folder(path: Path, root: Path, rename: Callable[[], object]) -> None:
    """Calls *rename*, which gives a file the name *path*; makes its folder if need be."""
    try:
        rename()
    except FileNotFoundError:
        make_durable_folder(path.parent, root)
        rename()


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keeps others out, in whatever process, lest a sidecar be another's than its file."""
    try:
        folder = os.open(root / METADATA_FOLDER, os.O_RDONLY)
    except FileNotFoundError:  # which the first sidecar makes
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


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

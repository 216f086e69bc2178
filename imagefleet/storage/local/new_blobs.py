"""Creates blobs in a folder, several at once: each atomically, and durable when `create` returns.

A blob is written and synced under a temporary name, then linked to its own, and last its folder is
synced, once for all that are created together.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imagefleet import errors

#: Folders beside the blobs in their folder; no segment of a blob's name starts with a dot.
METADATA_FOLDER = ".metadata"
TEMPORARY_FOLDER = ".temporary"

_IN_THE_WAY = (FileExistsError, IsADirectoryError, NotADirectoryError)
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP})


class NewBlob(NamedTuple):
    """A blob's name, its content or what writes it, and the text of its sidecar."""

    name: str
    content: bytes | Callable[[BinaryIO], None]
    details: bytes


@dataclass(slots=True)
class _Draft:
    """A blob on its way; *outcome* is whether it was created, or an error; None: not yet.

    *sidecar* and *file* have temporary names, as long as there are such.
    """

    blob: NewBlob
    path: str  # strings: pathlib takes longer than the system's calls
    temporary: str
    sidecar: str | None = None
    file: BinaryIO | None = None
    outcome: bool | errors.FleetError | None = None

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


class NewBlobs:
    """Creates blobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = str(folder)

    def create(self, blobs: Sequence[NewBlob]) -> list[bool | Exception]:
        """One result per blob: True if created, False if its name is taken, or the error."""
        temporary = f"{self._root}/{TEMPORARY_FOLDER}/"
        drafts = [
            _Draft(blob, f"{self._root}/{blob.name}", temporary + os.urandom(16).hex())
            for blob in blobs
        ]
        try:
            # File by file, each sync would wait for the file system's journal anew.
            for step in (self._write, _sync):
                self._each(drafts, step)
            with self._alone():
                self._each(drafts, self._link)
        finally:
            for draft in drafts:
                if draft.file is not None:
                    with contextlib.suppress(
                        OSError
                    ):  # of a full disk, which the outcome tells
                        draft.file.close()
                    _remove(draft.temporary)
                if draft.sidecar is not None:
                    _remove(draft.sidecar)
        # Also of those that somebody else has created: the message is deleted next, which reaches
        # the disk with a later send or checkpoint, and a power failure must not lose both.
        stored = [draft for draft in drafts if isinstance(draft.outcome, bool)]
        for folder in {draft.folder for draft in stored}:
            within = [draft for draft in stored if draft.folder == folder]
            self._noting_errors(within, partial(sync, folder))
        return [draft.outcome or False for draft in drafts]

    def _each(self, drafts: Sequence[_Draft], step: Callable[[_Draft], None]) -> None:
        for draft in drafts:
            if draft.outcome is None:
                self._noting_errors([draft], partial(step, draft))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps others out, in whatever process, lest a sidecar be another's than its file."""
        try:
            folder = os.open(f"{self._root}/{METADATA_FOLDER}", os.O_RDONLY)
        except FileNotFoundError:  # which the first sidecar makes
            yield
            return
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _noting_errors(
        self, drafts: Sequence[_Draft], work: Callable[[], None]
    ) -> None:
        try:
            work()
        except errors.FleetError as error:
            failure = error
        except OSError as error:
            failure = translated(error, self._folder)
            failure.__cause__ = error
        else:
            return
        for draft in drafts:
            draft.outcome = failure

    def _write(self, draft: _Draft) -> None:
        if _is_file(draft.path):
            draft.outcome = False
            return
        # Not synced: no job depends on it.
        draft.sidecar = f"{draft.temporary}.json"
        with self._open(draft.sidecar) as file:
            file.write(draft.blob.details)
        draft.file = self._open(draft.temporary)
        if isinstance(draft.blob.content, bytes):
            draft.file.write(draft.blob.content)
        else:
            draft.blob.content(draft.file)
        draft.file.flush()
        if hasattr(os, "posix_fadvise"):
            # Starts writing to the disk without waiting for it.
            os.posix_fadvise(draft.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self, temporary: str) -> BinaryIO:
        try:
            return open(temporary, "xb")  # noqa: PTH123 - see `_Draft`
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise no_folder(self._folder) from None
            path = Path(temporary)
            path.parent.mkdir(exist_ok=True)
            return path.open("xb")

    def _link(self, draft: _Draft) -> None:
        """Gives the finished file its name, and its sidecar before, so that none is without."""
        if _is_file(draft.path):
            draft.outcome = False
            return
        sidecar = f"{self._root}/{METADATA_FOLDER}/{draft.blob.name}.json"
        self._in_folder(sidecar, partial(os.replace, str(draft.sidecar), sidecar))
        draft.sidecar = None
        try:
            self._in_folder(draft.path, partial(os.link, draft.temporary, draft.path))
        except FileExistsError:
            if not _is_file(draft.path):
                raise
            draft.outcome = False
        else:
            draft.outcome = True

    def _in_folder(self, path: str, rename: Callable[[], None]) -> None:
        """Calls *rename*, which gives a file the name *path*; makes its folder if need be."""
        try:
            rename()
        except FileNotFoundError:
            make_durable_folder(Path(path).parent, self._folder)
            rename()


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


def _sync(draft: _Draft) -> None:
    if draft.file is not None:
        os.fsync(draft.file.fileno())


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)  # noqa: PTH108 - see `_Draft`


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - see `_Draft`
    except (FileNotFoundError, NotADirectoryError):
        return False

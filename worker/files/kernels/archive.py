"""A folder of compiled kernels as one file, NAME.tar.xz, with its key inside.

Loading kernels runs the code in them: whoever can write such a file where workers find it can run
programs there.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from imagefleet import errors
from imagefleet.files.kinds import KERNELS
from worker.files.disk_cache import DiskCache, appearing
from worker.files.kernels.key import Key

(SUFFIX,) = KERNELS.suffixes

#: The first entry: the key, and how much follows.
HEADER = "kernels.json"

#: A UNet's kernels have some 100 MB; far more would be meant to fill the disk.
MAX_BYTES = 8 * 2**30

_MAX_HEADER_BYTES = 2**16

#: Stands for the folder in Triton's lists of files, which have absolute paths.
_FOLDER = b"[KERNELS]"

#: What torch and the workers keep beside the kernels.
_LEFT_OUT_FOLDERS = frozenset({"locks"})
_LEFT_OUT_SUFFIXES = frozenset({".lock", ".part", ".ready", ".pyc"})
_LOCK = "lock"

#: The most characters of an entry's name in a message.
_SHOWN_CHARACTERS = 80


class UnusableArchiveError(errors.FleetError):
    """An archive of kernels is damaged, or for another key."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an archive says of itself: its key, and the files behind the header."""

    key: Key
    files: int
    bytes: int


def pack(
    folder: Path, key: Key, target: Path, on_progress: Callable[[int, int], None] = lambda *_: None
) -> Header:
    """Writes *target* in one step; *on_progress* gets the bytes packed so far, and in all."""
    files = list(_files(folder))
    sizes = [len(_read(path, folder)) if _has_paths(path) else _size(path) for path in files]
    header = Header(key, len(files), sum(sizes))
    packed = 0
    with appearing(target) as part:
        # Without times and owners, which would make each archive another.
        with tarfile.open(part, "w:xz", format=tarfile.GNU_FORMAT) as tar:
            _add(tar, HEADER, json.dumps(asdict(header), indent=2, sort_keys=True).encode())
            for path in files:
                content = _read(path, folder)
                _add(tar, path.relative_to(folder).as_posix(), content)
                packed += len(content)
                on_progress(packed, header.bytes)
        part.chmod(0o644)
    return header


def read_header(path: Path) -> Header:
    """What an archive is for; raises UnusableArchiveError if it is none."""
    with _opened(path) as archive:
        return archive.header


def check(path: Path) -> Header:
    """Reads all of an archive; raises UnusableArchiveError if any of it is damaged."""
    with _opened(path) as archive:
        for _ in archive.files():
            pass
        return archive.header


def unpack(path: Path, folder: Path, key: Key) -> Header:
    """Unpacks into *folder*, each file in one step; those that are there already stay.

    Raises:
        UnusableArchiveError: it is damaged or for another key, and nothing was unpacked; NodeError,
        SetupError: the disk is full, or the folder not writable.
    """
    if others := key.differences(read_header(path).key):
        raise UnusableArchiveError(f"{path} is for {', '.join(others)}")
    check(path)
    cache = DiskCache(folder)
    with _opened(path) as archive:
        with cache.errors():
            folder.mkdir(parents=True, exist_ok=True)
            cache.check_room(archive.header.bytes)
        for name, content in archive.files():
            with cache.errors():
                _write(folder / name, content, folder)
        return archive.header


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Archive]:
    try:
        with lzma.open(path) as data, tarfile.open(fileobj=data, mode="r|") as tar:
            yield _Archive(path, data, tar)
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise UnusableArchiveError(f"{path} is damaged, or no archive: {error}") from None


class _Archive:
    """An archive, read from its start to its end."""

    def __init__(self, path: Path, data: lzma.LZMAFile, tar: tarfile.TarFile) -> None:
        self._path = path
        self._data = data
        self._tar = tar
        self._entries = iter(tar)
        self.header = self._read_header()

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the files behind the header."""
        files = size = 0
        for entry in self._entries:
            name = PurePosixPath(entry.name)
            files, size = files + 1, size + entry.size
            is_inside = not name.is_absolute() and ".." not in name.parts
            if not (is_inside and entry.isfile() and size <= self.header.bytes):
                shown = entry.name[:_SHOWN_CHARACTERS]
                raise UnusableArchiveError(f"{self._path} has an entry not its own: {shown!r}")
            yield entry.name, self._content(entry)
        while self._data.read(io.DEFAULT_BUFFER_SIZE):  # to the checksum
            pass
        if (files, size) != (self.header.files, self.header.bytes):
            raise UnusableArchiveError(
                f"{self._path} has {files} of {self.header.files} files: copy it again"
            )

    def _read_header(self) -> Header:
        unreadable = f"{self._path} has no key of kernels that this version reads"
        entry = next(self._entries, None)
        if entry is None or entry.name != HEADER or entry.size > _MAX_HEADER_BYTES:
            raise UnusableArchiveError(unreadable)
        try:
            found: dict[str, Any] = json.loads(self._content(entry))
            header = Header(Key(**found.pop("key")), int(found["files"]), int(found["bytes"]))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise UnusableArchiveError(unreadable) from None
        if header.bytes > MAX_BYTES:
            raise UnusableArchiveError(f"{self._path} is too large: {header.bytes:,} bytes")
        return header

    def _content(self, entry: tarfile.TarInfo) -> bytes:
        file = self._tar.extractfile(entry)
        return file.read() if file is not None else b""


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        is_left_out = (
            path.suffix in _LEFT_OUT_SUFFIXES
            or path.name == _LOCK
            or path.relative_to(folder).parts[0] in _LEFT_OUT_FOLDERS
        )
        if not is_left_out and path.is_file() and not path.is_symlink():
            yield path


def _read(path: Path, folder: Path) -> bytes:
    content = path.read_bytes()
    return content.replace(os.fsencode(folder), _FOLDER) if _has_paths(path) else content


def _write(path: Path, content: bytes, folder: Path) -> None:
    if path.exists():
        return
    with appearing(path) as part:
        own = content.replace(_FOLDER, os.fsencode(folder)) if _has_paths(path) else content
        part.write_bytes(own)


def _size(path: Path) -> int:
    return path.stat().st_size


def _has_paths(path: Path) -> bool:
    return path.name.startswith("__grp__")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))
